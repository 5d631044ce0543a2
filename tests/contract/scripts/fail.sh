#!/bin/bash
# Every way to fail that needs no Python. Argument: which.
# Nobody fails before all ranks of the attempt are there.
count=$TORCHELASTIC_RESTART_COUNT
echo "$count" >> "starts-$RANK"
for ((other = 0; other < WORLD_SIZE; other++)); do
    until grep -qsx "$count" "starts-$other"; do sleep 0.02; done
done
case "$1" in
    exit) exit 138 ;;
    segfault) kill -SEGV $$ ;;
    flat-int) echo '{"message": "flat words", "timestamp": 1700000000}' > "$TORCHELASTIC_ERROR_FILE"; exit 3 ;;
    flat-text) echo '{"message": "flat words", "timestamp": "1700000000"}' > "$TORCHELASTIC_ERROR_FILE"; exit 3 ;;
    malformed) echo '{"message": {"message": "half' > "$TORCHELASTIC_ERROR_FILE"; exit 3 ;;
    no-message) echo '{"words": 1}' > "$TORCHELASTIC_ERROR_FILE"; exit 3 ;;
    always) if [ "$RANK" = 1 ]; then exit 1; fi; exec sleep 300 ;; # the same rank each time
    late)
        if [ "$RANK" = 0 ]; then echo $$ > first.tmp; mv first.tmp first; exit 0; fi
        until [ -e first ]; do sleep 0.02; done
        while kill -0 "$(cat first)" 2> /dev/null; do sleep 0.02; done
        exit 5 ;;
    once) if [ "$RANK" = 1 ] && [ "$count" = 0 ]; then kill -KILL $$; fi ;;
esac
