"""Programs with several tasks: `PROGRAM TASK ARGUMENTS`."""

import argparse
import json

_parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter)
_tasks = _parser.add_subparsers(required=True)


def task(*arguments, **options):
    """Makes a function a task: `arguments` are names or (name, type); `options` have a default. A list is of numbers."""

    def add(function):
        one = _tasks.add_parser(function.__name__.strip("_").replace("_", "-"))
        for argument in arguments:
            name, kind = argument if isinstance(argument, tuple) else (argument, str)
            one.add_argument(name.rstrip("*"), type=kind, nargs="+" if name.endswith("*") else None)
        for name, default in options.items():
            if default is False:
                one.add_argument(f"--{name}", action="store_true")
            elif isinstance(default, list):
                one.add_argument(f"--{name}", type=int, nargs="+")
            else:
                one.add_argument(f"--{name}", type=type(default), default=default)
        one.set_defaults(task=function)
        return function

    return add


def say(found):
    """The last line."""
    print(json.dumps(found), flush=True)


def main(description):
    """Does the task that the command line names."""
    _parser.description = description
    options = _parser.parse_args()
    options.task(options)
