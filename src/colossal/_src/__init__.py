"""The implementation. Nothing here is public: what users need is exported by the modules beside this folder."""
