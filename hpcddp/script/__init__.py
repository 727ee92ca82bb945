"""The request side: from what a user asks for to the text of a job script. No torch, no scheduler is contacted."""
