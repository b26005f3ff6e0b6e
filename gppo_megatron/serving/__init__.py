"""A small HTTP server that speaks SGLang's protocol over the embedded engine, for laptops and tests."""
