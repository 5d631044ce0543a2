"""Write the generated tables of the documentation anew: `python -m tools.docs`."""

from tools.docs import blocks

for page in blocks.pages():
    text = page.read_text(encoding="utf-8")
    if (filled := blocks.filled(text)) != text:
        page.write_text(filled, encoding="utf-8")
        print(f"{page.name}: written")
