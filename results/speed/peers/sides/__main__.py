"""Runs one side in this process, by its name and its job in JSON, and prints what came of it in JSON."""

import importlib
import os
import sys

import torch

from sides.job import Job, Measurement

_, name, json_of_job = sys.argv
side = importlib.import_module(f"sides.{name}")
outcome = side.run(Job.from_json(json_of_job))
measurement = Measurement(outcome, torch_version=torch.__version__, cores=os.cpu_count() or 1)
print(measurement.to_json())
