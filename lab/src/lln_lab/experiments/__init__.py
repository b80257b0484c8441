"""The paper's experiments and ours: tasks, trainings, their cells, and what tables may claim."""
