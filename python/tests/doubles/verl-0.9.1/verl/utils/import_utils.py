"""Follows verl/utils/import_utils.py of verl 0.9.1."""

import importlib


def import_external_libs(external_libs=None):
    names = external_libs if isinstance(external_libs, list) else [external_libs]
    for name in filter(None, names):
        importlib.import_module(name)
