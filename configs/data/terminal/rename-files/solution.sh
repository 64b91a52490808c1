cd photos
for file in *; do
  mv -- "$file" "$(printf '%s' "$file" | tr 'A-Z ' 'a-z_')"
done
