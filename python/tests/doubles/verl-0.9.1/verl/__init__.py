"""A double of verl 0.9.1: its interface of checkpoint engines. Each module names the file whose interface it has."""

__version__ = "0.9.1"
