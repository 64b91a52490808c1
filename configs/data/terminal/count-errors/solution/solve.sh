awk '$2 == "ERROR"' server.log | wc -l > errors.txt
