//! Colours by meaning; without colour (NO_COLOR), weight and inversion.

use ratatui::style::{Color, Modifier, Style};

/// Style of the screen.
#[derive(Clone, Copy, Debug)]
pub struct Theme {
    plain: bool,
}

/// The lifetimes' colours, by number: auto, transient, step, persistent.
const LIFETIMES: [Color; 4] = [Color::Blue, Color::Magenta, Color::Yellow, Color::Green];

impl Theme {
    /// `plain`: without colour.
    pub fn new(plain: bool) -> Self {
        Self { plain }
    }

    fn coloured(self, colour: Color) -> Style {
        if self.plain { Style::new() } else { Style::new().fg(colour) }
    }

    /// Names and headings.
    pub fn title(self) -> Style {
        Style::new().add_modifier(Modifier::BOLD)
    }

    /// Rarely read text.
    pub fn dim(self) -> Style {
        if self.plain {
            Style::new().add_modifier(Modifier::DIM)
        } else {
            Style::new().fg(Color::DarkGray)
        }
    }

    /// The chosen row: the terminal's own colours, reversed, readable on a light and on a dark
    /// terminal.
    pub fn chosen(self) -> Style {
        Style::new().add_modifier(Modifier::REVERSED | Modifier::BOLD)
    }

    /// A part of the chosen row: without its colour, which would become a background when reversed.
    pub fn of_chosen(self, style: Style) -> Style {
        Style { fg: None, bg: None, ..style.remove_modifier(Modifier::DIM) }
    }

    /// Live memory.
    pub fn live(self) -> Style {
        self.coloured(Color::Cyan)
    }

    /// Memory that is free now, but was live at the recent peak.
    pub fn peak(self) -> Style {
        self.coloured(Color::Blue)
    }

    /// Held memory that is not live.
    pub fn reserved(self) -> Style {
        self.coloured(Color::Yellow)
    }

    /// A ceiling.
    pub fn limit(self) -> Style {
        self.coloured(Color::Red)
    }

    /// A lifetime.
    pub fn lifetime(self, number: usize) -> Style {
        self.coloured(LIFETIMES[number % LIFETIMES.len()])
    }

    /// All is well.
    pub fn good(self) -> Style {
        self.coloured(Color::Green)
    }

    /// Needs a look.
    pub fn warn(self) -> Style {
        self.coloured(Color::Yellow).add_modifier(Modifier::BOLD)
    }

    /// Needs action now.
    pub fn bad(self) -> Style {
        if self.plain {
            Style::new().add_modifier(Modifier::BOLD | Modifier::REVERSED)
        } else {
            Style::new().fg(Color::Red).add_modifier(Modifier::BOLD)
        }
    }

    /// A key in the line of keys.
    pub fn key(self) -> Style {
        if self.plain {
            self.title()
        } else {
            Style::new().fg(Color::Cyan).add_modifier(Modifier::BOLD)
        }
    }
}
