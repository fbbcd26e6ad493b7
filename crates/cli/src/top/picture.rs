//! A screen as a picture, in the colours of a light and of a dark terminal: for snapshots of tests,
//! and for people.

use std::fmt::Write as _;

use ratatui::buffer::{Buffer, Cell};
use ratatui::style::{Color, Modifier};

/// The colours of a terminal.
pub struct Palette {
    pub name: &'static str,
    text: &'static str,
    ground: &'static str,
}

pub const LIGHT: Palette = Palette { name: "light", text: "#000000", ground: "#ffffff" };
pub const DARK: Palette = Palette { name: "dark", text: "#eeeeec", ground: "#000000" };

/// A cell's width and height, in pixels.
const CELL: (usize, usize) = (8, 16);

impl Palette {
    /// Text and background colour of a cell. The palette is Tango's, as in GNOME's terminal.
    pub fn colours(&self, cell: &Cell) -> (&'static str, &'static str) {
        let named = |colour: Color, other| match colour {
            Color::Reset => other,
            Color::Red => "#cc0000",
            Color::Green => "#4e9a06",
            Color::Yellow => "#c4a000",
            Color::Blue => "#3465a4",
            Color::Magenta => "#75507b",
            Color::Cyan => "#06989a",
            Color::DarkGray => "#555753",
            colour => {
                panic!("{colour:?} looks as the terminal's theme wants: add it to the palette")
            }
        };
        let (text, ground) = (named(cell.fg, self.text), named(cell.bg, self.ground));
        if cell.modifier.contains(Modifier::REVERSED) { (ground, text) } else { (text, ground) }
    }

    /// The screen as SVG: a text element for each run of cells with the same style.
    pub fn svg(&self, buffer: &Buffer) -> String {
        let (columns, rows) = (usize::from(buffer.area.width), usize::from(buffer.area.height));
        let (width, height) = (columns * CELL.0, rows * CELL.1);
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
             font-family=\"monospace\" font-size=\"13\">\n\
             <rect width=\"{width}\" height=\"{height}\" fill=\"{}\"/>\n",
            self.ground
        );
        for (row, cells) in buffer.content().chunks(columns).enumerate() {
            let alike = |a: &Cell, b: &Cell| (a.fg, a.bg, a.modifier) == (b.fg, b.bg, b.modifier);
            let mut column = 0;
            for run in cells.chunk_by(alike) {
                self.run(&mut out, (column, row), run);
                column += run.len();
            }
        }
        out.push_str("</svg>\n");
        out
    }

    fn run(&self, out: &mut String, (column, row): (usize, usize), run: &[Cell]) {
        let (text, ground) = self.colours(&run[0]);
        let (x, y) = (column * CELL.0, row * CELL.1);
        let said: String = run.iter().map(Cell::symbol).collect();
        if ground != self.ground {
            let _ = writeln!(
                out,
                "<rect x=\"{x}\" y=\"{y}\" width=\"{}\" height=\"{}\" fill=\"{ground}\"/>",
                run.len() * CELL.0,
                CELL.1
            );
        }
        let blank = said.chars().take_while(|c| *c == ' ').count();
        let said = said.trim();
        if said.is_empty() {
            return;
        }
        let bold = run[0].modifier.contains(Modifier::BOLD);
        let weight = if bold { " font-weight=\"bold\"" } else { "" };
        let said = said.replace('&', "&amp;").replace('<', "&lt;");
        let _ = writeln!(
            out,
            "<text x=\"{}\" y=\"{}\" fill=\"{text}\"{weight} xml:space=\"preserve\" \
             textLength=\"{}\" lengthAdjust=\"spacingAndGlyphs\">{said}</text>",
            x + blank * CELL.0,
            y + 12,
            run.iter().map(Cell::symbol).collect::<String>().trim().chars().count() * CELL.0
        );
    }
}

/// Contrast of two colours, 1 to 21 (WCAG 2).
pub fn contrast(a: &str, b: &str) -> f64 {
    let linear = |text: &str, at: usize| {
        let value = f64::from(u8::from_str_radix(&text[at..at + 2], 16).expect("a colour")) / 255.0;
        if value <= 0.03928 { value / 12.92 } else { ((value + 0.055) / 1.055).powf(2.4) }
    };
    let luminance =
        |text: &str| 0.2126 * linear(text, 1) + 0.7152 * linear(text, 3) + 0.0722 * linear(text, 5);
    let (a, b) = (luminance(a), luminance(b));
    (a.max(b) + 0.05) / (a.min(b) + 0.05)
}
