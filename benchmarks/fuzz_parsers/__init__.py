"""This package changes valid inputs at random and looks at what mrl's parsers make of them."""
