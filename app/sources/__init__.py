"""Reading whatever people have: files, public sets, personal logs."""
