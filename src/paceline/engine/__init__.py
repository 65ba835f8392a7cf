"""The decoding loop: engine, scheduler, recovery of failed steps, phase clock, driver."""
