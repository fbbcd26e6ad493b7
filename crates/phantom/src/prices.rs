//! Price files: the costs of driver calls, as JSON.
//!
//! ```json
//! {"unit": "ns", "page_bytes": 2097152,
//!  "costs": {"create": {"ns": 29000, "source": "where this was read"}, "map": 2000}}
//! ```
//!
//! The names are those of [`Costs`]. A figure is in nanoseconds, alone or with its source; a
//! missing figure is that of `by-call`. The output of `tests/gpu/probe` is a price file too, with
//! its `costs` in `prices`.

use std::fmt;
use std::path::Path;
use std::sync::LazyLock;

use serde_json::{Map, Value};

use crate::costs::{Costs, PAGE};

/// Shipped price files: name, text.
const SHIPPED: [(&str, &str); 4] = [
    ("by-call", include_str!("../prices/by-call.json")),
    ("by-mapping", include_str!("../prices/by-mapping.json")),
    ("by-mapping-and-page", include_str!("../prices/by-mapping-and-page.json")),
    ("h200", include_str!("../prices/h200.json")),
];

/// The largest figure, nanoseconds: about an hour and a half. Sums of these stay far from the
/// clock's end.
const MOST: f64 = 5e12;

/// A parsed price file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prices {
    /// The requested name: that of a shipped file, or a path.
    pub name: String,
    /// The figures.
    pub costs: Costs,
    /// The figures missing from the file.
    pub left_out: Vec<&'static str>,
}

/// Reason to reject prices: the file, what is wrong with it, what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PriceError(String);

impl fmt::Display for PriceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for PriceError {}

static BY_CALL: LazyLock<Prices> = LazyLock::new(|| {
    let (name, text) = SHIPPED[0];
    // No figure is missing (a test checks that), and the zeros would show at once.
    Prices::over(Costs::zero(), name, text).unwrap_or_else(|error| panic!("{error}"))
});

impl Prices {
    /// The shipped file that was measured on a GPU.
    pub const MEASURED: &str = "h200";

    /// The names of the shipped files.
    pub fn shipped() -> impl Iterator<Item = &'static str> {
        SHIPPED.iter().map(|&(name, _)| name)
    }

    /// The prices of the stand-in's own clock, assumed: a call costs the same over any number of
    /// mappings.
    pub fn by_call() -> &'static Prices {
        &BY_CALL
    }

    /// The shipped prices called `name`, or those of the file at that path.
    ///
    /// # Errors
    /// If `name` is neither a shipped name nor a readable file, or the file is no price file.
    pub fn open(name: &str) -> Result<Prices, PriceError> {
        if let Some((_, text)) = SHIPPED.iter().find(|&&(shipped, _)| shipped == name) {
            return Prices::read(name, text);
        }
        let text = std::fs::read_to_string(Path::new(name)).map_err(|error| {
            let names: Vec<_> = Prices::shipped().collect();
            PriceError(format!(
                "prices {name}: no prices of this name ship, and the file cannot be read \
                 ({error}); name one of {} or a JSON file",
                names.join(", ")
            ))
        })?;
        Prices::read(name, &text)
    }

    /// The prices in `text`, read from `name`.
    ///
    /// # Errors
    /// If `text` is no price file; the error says what is wrong.
    pub fn read(name: &str, text: &str) -> Result<Prices, PriceError> {
        Prices::over(Prices::by_call().costs, name, text)
    }

    fn over(mut costs: Costs, name: &str, text: &str) -> Result<Prices, PriceError> {
        let wrong = |what: String| PriceError(format!("prices {name}: {what}"));
        let document: Value = serde_json::from_str(text).map_err(|error| {
            wrong(format!("it is no JSON ({error}); crates/phantom/prices/by-call.json is a model"))
        })?;
        // The probe's document nests its prices one level deeper.
        let holder = document.get("prices").unwrap_or(&document);
        let figures = holder.get("costs").and_then(Value::as_object).ok_or_else(|| {
            wrong(
                "it has no object \"costs\"; crates/phantom/prices/by-call.json is a model, and so \
                 is what tests/gpu/probe --json writes"
                    .to_owned(),
            )
        })?;
        if let Some(unit) = holder.get("unit").filter(|unit| **unit != "ns") {
            return Err(wrong(format!(
                "\"unit\" is {unit}; figures are nanoseconds: give them so, and \"ns\" here"
            )));
        }
        if let Some(page) = holder.get("page_bytes").filter(|page| page.as_u64() != Some(PAGE)) {
            return Err(wrong(format!(
                "\"page_bytes\" is {page}; figures are by pages of {PAGE} bytes: give them so"
            )));
        }
        for (figure, value) in figures {
            let place = costs.named(figure).ok_or_else(|| {
                wrong(format!(
                    "\"{figure}\" is no call's price; there are {}",
                    Costs::NAMES.join(", ")
                ))
            })?;
            *place = nanoseconds(value).ok_or_else(|| {
                wrong(format!(
                    "\"{figure}\" is {value}; a figure is nanoseconds from 0 to {MOST:.0}, or \
                     {{\"ns\": figure, \"source\": text}}"
                ))
            })?;
        }
        Ok(Prices { name: name.to_owned(), costs, left_out: left_out(figures) })
    }
}

fn nanoseconds(value: &Value) -> Option<u64> {
    let figure = value.as_f64().or_else(|| value.get("ns")?.as_f64())?;
    (0.0..=MOST).contains(&figure).then_some(figure.round() as u64)
}

fn left_out(figures: &Map<String, Value>) -> Vec<&'static str> {
    Costs::NAMES.iter().copied().filter(|name| !figures.contains_key(*name)).collect()
}
