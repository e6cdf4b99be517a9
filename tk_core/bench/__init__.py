"""Cases, timers, report and plots of `python -m tk_core bench`; the cases also feed the tests."""
