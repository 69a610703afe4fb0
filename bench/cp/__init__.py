"""The suite ``cp``: one sequence over several GPUs."""
