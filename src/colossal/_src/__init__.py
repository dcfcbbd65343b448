"""The implementation. Nothing here is public: the modules next to this folder export what users need."""
