"""Follows verl/checkpoint_engine/__init__.py of verl 0.9.1."""

from .base import CheckpointEngine, CheckpointEngineRegistry

__all__ = ["CheckpointEngine", "CheckpointEngineRegistry"]
