# The policy on GPUs. Build it in a checkout: docker build -t megatron-policy .
# The base brings torch, CUDA, NCCL and Transformer Engine, built for each other: they stay as they are.
ARG BASE=nvcr.io/nvidia/pytorch:25.12-py3
FROM ${BASE}

WORKDIR /opt/megatron-policy
COPY pyproject.toml setup.py README.md LICENSE ./
COPY converters converters
COPY megatron_policy megatron_policy
RUN python -c "from importlib.metadata import version as v; \
    print(*(f'{name}=={v(name)}' for name in ('torch', 'transformer-engine')), sep='\n')" > base.txt \
    && pip install --no-cache-dir --constraint base.txt ".[te,ray,refit]" \
    && megatron-policy --version

WORKDIR /workspace
CMD ["megatron-policy", "--help"]
