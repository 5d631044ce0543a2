"""Inside the user's process: from the fork to the first line of the script. Standard library only."""
