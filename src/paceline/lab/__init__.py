"""What measures and examines: bench, tune, certify, doctor, profiling and their reports."""
