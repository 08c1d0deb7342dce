"""Follows vllm/plugins/__init__.py of vLLM 0.32.0."""

from importlib.metadata import entry_points

DEFAULT_PLUGINS_GROUP = "vllm.general_plugins"
plugins_loaded = False


def load_general_plugins():
    global plugins_loaded
    if not plugins_loaded:
        plugins_loaded = True
        for point in entry_points(group=DEFAULT_PLUGINS_GROUP):
            point.load()()
