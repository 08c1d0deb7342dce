"""Inference engines that follow a model: vLLM, SGLang, transformers and prime-rl.

    import gradfs
    from gradfs.engines import sglang

    server = sglang.Server("http://127.0.0.1:30000")
    server.follow("/mnt/job/model", timeout=3600)

Each engine has a module of its own, which imports it when it is needed. This one imports none of them. For anything else
there is `gradfs.follow`.
"""

from gradfs.engines.pinned import Pinned, pin

__all__ = ["Pinned", "pin"]
