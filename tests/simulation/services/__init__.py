"""The services of the project, each with the programs that a seed makes of it."""
