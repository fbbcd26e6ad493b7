//! The random programs of `random_trace.py`, each with the capacity of its device.

use gruyere_replay::trace::Trace;
use std::path::Path;
use std::process::Command;

pub type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// A random program near a device's capacity.
pub struct Program {
    /// The program.
    pub trace: Trace,
    /// Capacity of its device (bytes).
    pub capacity: u64,
    /// The kind of program.
    pub kind: String,
}

impl Program {
    /// The program of a seed, by way of `file`.
    pub fn of(seed: u64, file: &Path) -> Outcome<Self> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/random_trace.py");
        let said = Command::new("python3").arg(&script).arg(seed.to_string()).arg(file).output()?;
        if !said.status.success() {
            return Err(
                format!("{}: {}", script.display(), String::from_utf8_lossy(&said.stderr)).into()
            );
        }
        let said = String::from_utf8(said.stdout)?;
        let words: Vec<&str> = said.split_whitespace().collect();
        let [kind, _, capacity, _] = words[..] else {
            return Err(format!("{said}: kind, streams, GiB, blocks expected").into());
        };
        let capacity = (capacity.parse::<f64>()? * f64::from(1 << 30)) as u64;
        Ok(Self { trace: Trace::open(file)?, capacity, kind: kind.to_owned() })
    }
}
