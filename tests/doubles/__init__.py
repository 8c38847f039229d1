"""Test doubles: a broker that does as a test says, consumers that a test steers, and fixtures for both."""
