"""The fixtures of doctor_folders for all tests of the doctor."""

from doctor_folders import bf16 as bf16
from doctor_folders import copy as copy
