"""The files of both formats: Hugging Face directories (`hf_*`, safetensors) and Megatron-Core's
sharded checkpoints (`dist_*`). Read `hf_files.py` first, then `dist_files.py`.
"""
