# Sourced: VENV is the folder of the environment, CACHE that of what is compiled for it.
#
# A Python that PYTHON names has folders of its own, so that environments of several Pythons lie beside each other. A name
# that is no Python is refused by tests/setup_env.sh, which runs before anything is done in these folders.
VENV=.venv CACHE=.cache
if [ -n "${PYTHON:-}" ]; then
    CACHE=.cache/python$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true)
    VENV=$CACHE/venv
fi
