"""Leases: resources that are granted for a time, and renewed as long as they are needed (EV.2.1)."""
