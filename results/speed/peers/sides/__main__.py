"""Runs one side in this process, by its name and its job in JSON, and prints what came of it in JSON."""

import importlib
import json
import os
import sys
from dataclasses import asdict

import torch

from sides.job import Job, Measurement

_, name, job_in_json = sys.argv
side = importlib.import_module(f"sides.{name}")
outcome = side.run(Job(**json.loads(job_in_json)))
measurement = Measurement(outcome, torch=torch.__version__, threads=os.cpu_count() or 1)
print(json.dumps(asdict(measurement)))
