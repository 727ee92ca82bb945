"""The command line: argv, stdout and exit statuses. One module per verb."""
