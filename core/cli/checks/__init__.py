"""What `attnloom doctor` looks at: one file per thing, each gives a Section."""
