"""Runs one side in this process, by its name and its job in JSON, and prints what came of it in JSON."""

import importlib
import json
import os
import sys
from dataclasses import asdict

import torch

from sides.job import Measurement, job_from_json

_, name, job = sys.argv
side = importlib.import_module(f"sides.{name}")
outcome = side.run(job_from_json(job))
measurement = Measurement(outcome, torch=torch.__version__, cores=os.cpu_count() or 1)
print(json.dumps(asdict(measurement)))
