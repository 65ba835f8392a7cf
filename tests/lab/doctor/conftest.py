"""The fixtures of support.doctor_folders for all tests of the doctor."""

from support.doctor_folders import bf16 as bf16
from support.doctor_folders import copy as copy
