# suite.sh SECONDS WORKERS36 ORDER36 WORKERS39 ORDER39
K=$PWD/lab
one() {
  TRITON_CACHE_DIR=/tmp/tc$1 PYTHONPATH=$4:$K CHOSEN_TESTS=$K/$3 timeout -s INT -k 8 $seconds python3 -m pytest -m gpu -p no:cacheprovider -p chosen_tests -n $2 --dist load --maxschedchunk 1 -v tests > $OUT/suite-$1.log 2>&1
  echo "rc $?" >> $OUT/suite-$1.log
}
seconds=$1
one 36 $2 $3 . & one 39 $4 $5 /tmp/t39:. & wait
for r in 36 39; do f=$OUT/suite-$r.log; echo "== $r: passed $(grep -c ' PASSED ' $f) failed $(grep -c ' FAILED ' $f) skipped $(grep -c ' SKIPPED ' $f)"; grep -E "FAILED|^ERROR|^E  " $f | sort -u | head -24 | cut -c1-220; tail -2 $f | cut -c1-160; done
