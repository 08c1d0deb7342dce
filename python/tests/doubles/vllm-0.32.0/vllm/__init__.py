"""A double of vLLM 0.32.0: the interfaces that gradfs calls, and a model of transformers behind them.

Each module names the file of that release whose interface it has. What gradfs does not call is left out.
"""

from vllm.entrypoints.llm import LLM, SamplingParams

__version__ = "0.32.0"
__all__ = ["LLM", "SamplingParams"]
