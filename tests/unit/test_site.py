"""The documentation site: nothing public, no key, no error and no page is left out of it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from megatron_policy import errors
from megatron_policy.config import PolicyConfig, numbers
from megatron_policy.config.keys import KEYS
from megatron_policy.config.rules import Applied, Ignored, Nested, Rejected
from megatron_policy.errors import ConfigError
from tests.public_api import FILE
from tests.site import commands, links, made, messages, names, settings

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
ERRORS = [name for name, value in vars(errors).items() if inspect.isclass(value)]


def text_of(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def menu() -> str:
    return (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]


def test_every_public_name_has_an_entry_on_a_page_of_names() -> None:
    listed = re.findall(
        r"^module (\S+)((?:\n  .*)*)", FILE.read_text(encoding="utf-8"), re.MULTILINE
    )
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


def test_every_key_is_a_row_with_what_becomes_of_it() -> None:
    rows = settings.tables().replace("<wbr>", "")
    kinds = {Applied: r"(?:[^|]|\\\|)+\|(?:[^|]|\\\|)+", Ignored: "ignored", Rejected: "rejected"}
    for path, rule in KEYS.items():
        if isinstance(rule, Nested):
            assert f"## `policy.{path}`" in rows, path
        elif not path.endswith("*"):
            row = rf'^\| <code id="{re.escape(path)}">\w+</code> \| {kinds[type(rule)]}'
            assert re.search(row, rows, re.MULTILINE), path


def test_every_applied_key_says_what_it_takes_its_default_and_what_it_does() -> None:
    for _, keys in settings.sections():
        for key in keys:
            if isinstance(key.rule, Applied):
                assert key.takes and key.default and (key.about or key.rule.note), key.path


@pytest.mark.parametrize(
    ("kind", "legal", "illegal"),
    [
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
    ],
)
def test_legal_values_in_words_are_those_that_are_accepted(kind, legal, illegal) -> None:
    assert kind in settings.NUMBERS
    TypeAdapter(kind).validate_python(legal)
    with pytest.raises(ValidationError):
        TypeAdapter(kind).validate_python(illegal)


@pytest.mark.parametrize("section", ["reward_model_cfg", "router_replay"])
def test_a_section_that_only_megatron_core_reads_is_refused_by_the_other_engines(section) -> None:
    assert settings.ENGINES[f"{section}."] == settings.MEGATRON
    sizes = {"train_global_batch_size": 1, "train_micro_batch_size": 1}
    for engine in ("dtensor_cfg", "fsdp_cfg"):
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


def test_a_page_has_a_place_for_each_made_table() -> None:
    for page in ("configuration", "commands"):
        assert f"<!-- made: {page} -->" in text_of(f"reference/{page}.md")


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_has_a_page_that_says_what_it_means_and_what_to_do(name: str) -> None:
    page = text_of(f"errors/{name}.md")
    for title in ("What it means", "What to do", "Messages"):
        assert f"\n## {title}\n" in page
    assert f"[{name}]({name}.md)" in text_of("errors/index.md")
    assert messages.messages_of(page)


@pytest.mark.parametrize("name", ERRORS)
def test_messages_that_a_page_shows_are_those_of_the_code(name: str) -> None:
    for message in messages.messages_of(text_of(f"errors/{name}.md")):
        assert messages.share_of(message) > 0.25, message


def test_a_message_that_the_code_does_not_have_is_found() -> None:
    assert (
        messages.share_of("the policy could not go to sleep: wake it up and repeat the call") < 0.25
    )
    assert messages.share_of("policy.learning_rate is too large for this model: try 1e-5") < 0.25


def test_every_page_is_in_the_menu() -> None:
    entries = re.findall(r"[\w./-]+(?:\.md|/)$", menu(), re.MULTILINE)
    pages = [each.relative_to(DOCS).as_posix() for each in DOCS.rglob("*.md")]
    assert len(pages) > 25
    missing = [page for page in pages if not page.startswith(tuple(entries))]
    assert missing == [], "add them to nav in mkdocs.yml"
    assert [entry for entry in entries if entry.endswith(".md") and entry not in pages] == []


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
    assert {
        "repository/configs/grpo_qwen2_cpu.yaml.md",
        "repository/examples/ppo/README.md",
    } <= set(made)


def test_a_picture_outside_the_pages_is_copied(tmp_path: Path, monkeypatch) -> None:
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
    titles = re.findall(r"^#+ (.*)$", links.FENCE.sub("", page.read_text()), re.MULTILINE)
    words = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).strip().lower() for title in titles]
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", each)) for each in words}


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
    made.write_text(
        "# A `title`\n[a](#a-title) [b](#b) [c](c.md) [d](page.md#d) [e](https://x#y)\n"
    )
    assert lost(made) == ["#b", "c.md", "page.md#d"]


def test_links_in_code_stay_as_they_are() -> None:
    text = "```python\nx[0](../configs/grpo_qwen2_cpu.yaml)\n```\n"
    assert links.rewritten(text, "docs/plan.md") == text


@pytest.mark.parametrize("page", made.pages(), ids=lambda page: page.stem)
def test_pages_made_from_the_code_are_what_it_makes(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert made.filled(text) == text, "make compatibility"
