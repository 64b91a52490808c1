sed -i 's/^count=1$/count=0/' average.sh
