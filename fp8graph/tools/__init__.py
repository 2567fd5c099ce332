"""What looks at programs without running them, and the commands of the shell."""
