"""The documentation site: nothing public, no key, no error and no page is left out of it."""

from __future__ import annotations

import ast
import inspect
import re
from itertools import product
from pathlib import Path
from textwrap import dedent

import pytest
from pydantic import TypeAdapter, ValidationError

from megatron_policy import MegatronPolicy, Policy, errors
from megatron_policy.config import PolicyConfig, numbers
from megatron_policy.config.keys import KEYS
from megatron_policy.config.section import Applied, Ignored, Nested, Rejected
from megatron_policy.errors import ConfigError
from tests.public_api import FILE
from tests.site import commands, links, llms, made, messages, names, settings, titles

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
ERRORS = [name for name, value in vars(errors).items() if inspect.isclass(value)]


def text_of(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def menu() -> str:
    return (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]


def test_every_public_name_has_an_entry_on_a_page_of_names() -> None:
    listed = re.findall(r"^module (\S+)((?:\n  .*)*)", FILE.read_text("utf-8"), re.MULTILINE)
    wanted = {
        (module, name)
        for module, members in listed
        for name in re.findall(r"^  (?:class )?(\w+)", members, re.MULTILINE)
    }
    assert len(wanted) > 60
    assert {(module, name) for module, name, _ in names.public()} == wanted
    written = "\n".join(names.pages().values())
    for _, name in wanted:
        assert re.search(rf"^(?:::: \S+\.|## `){name}`?$", written, re.MULTILINE), name


def test_the_page_of_a_policy_leads_with_train_and_has_each_method_under_a_task() -> None:
    for path in names.GROUPED:
        room = names.room_of(*path.rsplit(".", 1))
        members, page = names.shown()[room][path], names.pages()[f"{names.FOLDER}/{room}.md"]
        tasks = names.by_task(members)
        assert next(iter(tasks.items()))[1][0] == "train"
        assert sorted(name for each in tasks.values() for name in each) == sorted(members)
        of_path = re.escape(path)
        (table,) = re.findall(rf"^\| to \|.*?^::: {of_path}$", page, re.MULTILINE | re.DOTALL)
        entries = re.findall(rf"^::: ({of_path}\.\w+)$", page, re.MULTILINE)
        assert re.findall(r"\(#([\w.]+)\)", table) == entries


@pytest.mark.parametrize("owner", [MegatronPolicy, Policy])
def test_a_policys_documentation_describes_each_of_its_attributes(owner: type) -> None:
    (tree,) = ast.parse(dedent(inspect.getsource(owner.__init__))).body
    kept = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and not node.attr.startswith("_")
    }
    attributes = inspect.getdoc(owner).partition("\nAttributes:\n")[2]
    described = re.findall(r"^    (\w+) \([^)]+\): ", attributes, re.MULTILINE)
    assert len(kept) > 1 and kept == set(described)


def test_every_key_is_a_row_with_what_becomes_of_it_and_applied_ones_say_what_they_do() -> None:
    rows = settings.tables().replace("<wbr>", "")
    kinds = {Applied: r"(?:[^|]|\\\|)+\|(?:[^|]|\\\|)+", Ignored: "ignored", Rejected: "rejected"}
    for path, rule in KEYS.items():
        if isinstance(rule, Nested):
            assert f"## `policy.{path}`" in rows, path
        elif not path.endswith("*"):
            row = rf'^\| <code id="{re.escape(path)}">\w+</code> \| {kinds[type(rule)]}'
            assert re.search(row, rows, re.MULTILINE), path
    for _, keys in settings.sections():
        for key in keys:
            if isinstance(key.rule, Applied):
                assert key.takes and key.default and key.about, key.path


def test_legal_values_in_words_are_those_that_are_accepted() -> None:
    for kind, legal, illegal in (
        (numbers.Count, 1, 0),
        (numbers.CountOrZero, 0, -1),
        (numbers.Limit, -1, -2),
        (numbers.Seed, numbers.MAX_SEED, numbers.MAX_SEED + 1),
        (numbers.Rate, numbers.MAX_RATE, 2 * numbers.MAX_RATE),
        (numbers.RateOrNone, -1, -2),
        (numbers.Epsilon, numbers.LEAST_FP32, 0),
        (numbers.Momentum, 0, 1),
        (numbers.Fraction, 1, 1.1),
        (numbers.Probability, 1, 0),
        (numbers.Norm, 0, -1),
        (numbers.Factor, numbers.MAX_FP32, 0),
        (numbers.Temperature, 0, -1),
        (numbers.Seconds, settings.SHORTEST_TIMEOUT_S, 0),
        (numbers.Gib, numbers.MAX_GIB, 0),
        (settings.Dtype, "bf16", "fp8"),
        (settings.WeightDtype, "bf16", "float16"),
    ):
        assert kind in settings.NUMBERS
        TypeAdapter(kind).validate_python(legal)
        with pytest.raises(ValidationError):
            TypeAdapter(kind).validate_python(illegal)


def test_a_section_that_only_megatron_core_reads_is_refused_by_the_other_engines() -> None:
    sizes = {"train_global_batch_size": 1, "train_micro_batch_size": 1}
    sections, engines = ("reward_model_cfg", "router_replay"), ("dtensor_cfg", "fsdp_cfg")
    for section, engine in product(sections, engines):
        assert settings.ENGINES[f"{section}."] == settings.MEGATRON
        raw = {"model_name": "m", **sizes, engine: {"enabled": True}, section: {"enabled": True}}
        with pytest.raises(ConfigError, match=section):
            PolicyConfig.parse(raw)


def test_every_command_and_option_is_a_row() -> None:
    rows = commands.sections()
    listed = FILE.read_text(encoding="utf-8").partition("\ncommands\n")[2]
    assert re.findall(r"^## `([\w-]+)`$", rows, re.MULTILINE) == re.findall(
        r"^  (\S+)$", listed, re.MULTILINE
    )
    for option in re.findall(r"^    (--?\w[\w-]*)", listed, re.MULTILINE):
        assert re.search(rf"^\| `{option}[ `]", rows, re.MULTILINE), option
    for page in ("configuration", "commands"):
        assert f"<!-- made: {page} -->" in text_of(f"reference/{page}.md")


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_has_a_page_that_says_what_it_means_what_to_do_and_its_messages(
    name: str,
) -> None:
    page = text_of(f"errors/{name}.md")
    for title in ("What it means", "What to do", "Messages"):
        assert f"\n## {title}\n" in page
    assert f"[{name}]({name}.md)" in text_of("errors/index.md")
    assert messages.messages_of(page)
    for message in messages.messages_of(page):
        assert messages.share_of(message) > 0.25, f"the code does not say: {message}"


def test_a_message_that_the_code_does_not_have_is_found() -> None:
    for message in (
        "the policy could not go to sleep: wake it up and repeat the call",
        "policy.learning_rate is too large for this model: try 1e-5",
    ):
        assert messages.share_of(message) < 0.25


def test_every_page_is_in_the_menu_and_in_llms_txt() -> None:
    entries = re.findall(r"[\w./-]+(?:\.md|/)$", menu(), re.MULTILINE)
    pages = [each.relative_to(DOCS).as_posix() for each in DOCS.rglob("*.md")]
    assert len(pages) > 25
    missing = [page for page in pages if not page.startswith(tuple(entries))]
    assert missing == [], "add them to nav in mkdocs.yml"
    assert [entry for entry in entries if entry.endswith(".md") and entry not in pages] == []
    text = llms.FILE.read_text(encoding="utf-8")
    assert llms.text() == text, "make compatibility"
    assert re.match(r"# megatron-policy\n\n> \S.*\n\n[^#\n].*\n\n## ", text)
    listed = re.findall(r"^- \[[^]]+\]\(([^)]+)\): \S.*$", text, re.MULTILINE)
    assert len(listed) == len([line for line in text.splitlines() if line.startswith("- ")])
    assert sorted(listed) == sorted([*pages, *(p.replace(".md", ".html") for p in names.pages())])


def readable() -> list[Path]:
    """All that people read: pages, READMEs and what is beside the first one, and notebooks."""
    pages = [*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "examples").rglob("*.md")]
    return [*pages, *(ROOT / "examples").rglob("*.ipynb"), *(ROOT / "tests").glob("*/*page.md")]


def file_names(text: str) -> list[str]:
    """Links to pages whose text is the name of a file, in place of a title."""
    to_page = r"\[([^]\n]*)\]\([^)\s]*?\.(?:md|ipynb)(?:#[^)]*)?\)"
    titles_of_links = re.findall(to_page, links.FENCE.sub("", text))
    return [each for each in titles_of_links if re.fullmatch(r"`?[\w./-]+\.(md|ipynb)`?", each)]


def test_a_link_to_a_page_has_a_title() -> None:
    found = {str(page): file_names(page.read_text(encoding="utf-8")) for page in readable()}
    assert {page: wrong for page, wrong in found.items() if wrong} == {}
    wrong = "[plan.md](plan.md) [Plan](plan.md) [docs/x.md](docs/x.md#y) [x.yaml](x.yaml)"
    assert file_names(wrong) == ["plan.md", "docs/x.md"]


def rows_of(text: str) -> list[list[str]]:
    """The rows of a page's tables, without their headers."""
    lines = re.findall(r"^\|(.*)\|$", text, re.MULTILINE)
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    rules = {place for place, row in enumerate(rows) if set("".join(row)) <= {"-", " "}}
    return [row for place, row in enumerate(rows) if not rules & {place, place + 1}]


def test_every_known_issue_has_a_way_around_and_a_page() -> None:
    rows = rows_of(text_of("known-issues.md"))
    assert len(rows) > 20
    for row in rows:
        what, around, more = row
        assert what.endswith(".") and around.endswith("."), row
        assert re.fullmatch(r"\[[^]]+\]\([^)]+\)", more), row


def test_figures_of_the_home_page_are_in_the_sections_that_it_names() -> None:
    home = text_of("index.md")
    assert re.search(r"^!\[[^]]+\]\(pictures/", home, re.MULTILINE)
    lines = titles.section(home, "in-figures")
    rows = rows_of("\n".join(home.splitlines()[lines.start : lines.stop]))
    assert len(rows) > 4
    for what, measured, where in rows:
        (page, _, anchor), *_ = [each.partition("#") for each in re.findall(r"\(([^)]*)\)", where)]
        text = text_of(page)
        part = titles.section(text, anchor) if anchor else range(1, len(text.splitlines()) + 1)
        said = "\n".join(text.splitlines()[part.start - 1 : part.stop - 1])
        figures = re.findall(r"\*\*([^*]+)\*\*", measured)
        assert figures and [each for each in figures if each not in said] == [], what


def test_a_summary_is_the_first_sentence_and_a_section_ends_at_the_next_title_like_it() -> None:
    code = "<!-- run by x -->\n```python\na.b = 1\n```\n"
    page = f"# A `title`\n\n{code}\n**See** [v2.0](x.md) of it. More.\n"
    assert titles.title_of(page) == "A `title`"
    assert titles.summary_of(page) == "See v2.0 of it."
    assert titles.first_paragraph(page) == "See v2.0 of it. More."
    assert titles.summary_of("# T\n\n| a |\n") == ""
    page = "# A\n\n## B c\n\n```\n# no title\n```\n\n### D\n\n## E\n"
    assert titles.section(page, "b-c") == range(3, 11)
    assert titles.section(page, "e") == range(11, 13)
    assert not titles.section(page, "f")


def test_links_that_leave_the_pages_lead_to_pages_of_those_files() -> None:
    text = "[a](../configs/x.yaml) [b](gpu.md#x) [c](../examples/ppo) [d](https://x.org/y.md)\n"
    real = text.replace("x.yaml", "grpo_qwen2_cpu.yaml")
    assert links.rewritten(real, "docs/plan.md") == (
        "[a](repository/configs/grpo_qwen2_cpu.yaml.md) [b](gpu.md#x) "
        "[c](repository/examples/ppo/README.md) [d](https://x.org/y.md)\n"
    )
    assert "../configs/x.yaml" in links.rewritten(text, "docs/plan.md")
    made = links.pages({"docs/plan.md": real})
    assert "model_name" in made["repository/configs/grpo_qwen2_cpu.yaml.md"]
    assert "repository/examples/ppo/README.md" in made


def test_a_picture_outside_the_pages_is_copied_and_links_in_code_stay(
    tmp_path: Path, monkeypatch
) -> None:
    code = "```python\nx[0](../configs/grpo_qwen2_cpu.yaml)\n```\n"
    assert links.rewritten(code, "docs/plan.md") == code
    monkeypatch.setattr(links, "ROOT", tmp_path)
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "curve.png").write_bytes(b"\x89PNG")
    text = "![a curve](../examples/curve.png)\n"
    assert links.rewritten(text, "docs/plan.md") == "![a curve](repository/examples/curve.png)\n"
    assert links.pages({"docs/plan.md": text}) == {"repository/examples/curve.png": b"\x89PNG"}


def test_a_notebook_is_a_page_with_its_outputs_and_the_pages_that_it_links_to() -> None:
    text = "[a notebook](../examples/tour.ipynb)\n"
    made = links.pages({"docs/recipes.md": text})
    page = made["repository/examples/tour.ipynb.md"]
    assert isinstance(page, str) and page.startswith("# A tour\n\nLoad a small checkpoint")
    assert "````python\nimport subprocess\n" in page and "````text\nfamily qwen2\n" in page
    assert "](data:image/png;base64,iVBOR" in page and "](../../losses.md)" in page
    assert "repository/README.md" in made


def anchors(page: Path) -> set[str]:
    """Those of a page's titles, as GitHub and the site make them."""
    return {each.anchor for each in titles.headings(page.read_text(encoding="utf-8"))}


def lost(page: Path) -> list[str]:
    """Links of a page to files or titles that are not in the checkout."""
    found = []
    for target, anchor in re.findall(
        r"\]\((?![a-z]+:)([^)\s#]*)(#[^)\s]*)?\)", links.FENCE.sub("", page.read_text())
    ):
        file = page.parent / target if target else page
        titled = not anchor or file.suffix != ".md" or anchor[1:] in anchors(file)
        found += [] if file.exists() and titled else [f"{target}{anchor}"]
    return found


def test_every_link_of_a_page_leads_to_a_file_and_a_title_of_the_checkout(tmp_path: Path) -> None:
    outside = [*ROOT.glob("*.md"), *(ROOT / "examples").rglob("*.md")]
    pages = [*DOCS.rglob("*.md"), *outside]
    assert ROOT / "README.md" in pages and len(pages) > 40
    assert {str(page): wrong for page in pages if (wrong := lost(page))} == {}
    made = tmp_path / "page.md"
    made.write_text("# A `t`\n[a](#a-t) [b](#b) [c](c.md) [d](page.md#d) [e](https://x#y)\n")
    assert lost(made) == ["#b", "c.md", "page.md#d"]


@pytest.mark.parametrize("page", made.pages(), ids=lambda page: page.stem)
def test_pages_made_from_the_code_are_what_it_makes(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert made.filled(text) == text, "make compatibility"
