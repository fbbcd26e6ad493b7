//! Sizes as users write them (`512KiB`, `2MiB`, `1.5GiB`, `90%`, or plain bytes), and bytes in
//! messages.
#![deny(unsafe_code, clippy::unwrap_used)]

use std::fmt;
use std::str::FromStr;

/// An amount of device memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Size {
    /// A number of bytes.
    Bytes(u64),
    /// A share, 0 to 100: of the device's memory, or of what the setting says.
    Percent(f64),
}

/// The ways to write a size, for messages.
pub const FORMS: &str = "a size such as 512KiB, 2MiB, 1.5GiB, 90% or plain bytes";

const UNITS: [(&str, u32); 5] = [("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40), ("B", 0)];

impl Size {
    /// The size in bytes on a device of `total` bytes, rounded down.
    pub fn resolve(self, total: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes,
            // 53 bits of mantissa hold the bytes of every device; 100% is exact.
            Self::Percent(percent) => (total as f64 * (percent / 100.0)) as u64,
        }
    }
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refuse = || format!("not a size; expected {FORMS}");
        if let Some(number) = text.strip_suffix('%') {
            let percent = decimal(number.trim_end()).ok_or_else(refuse)?;
            if percent > 100.0 {
                return Err("a percentage lies in 0% to 100%".into());
            }
            return Ok(Self::Percent(percent));
        }
        let (number, shift) = UNITS
            .iter()
            .find_map(|(unit, shift)| Some((text.strip_suffix(unit)?, *shift)))
            .unwrap_or((text, 0));
        let number = number.trim_end();
        if let Ok(whole) = number.parse::<u64>() {
            let bytes = whole.checked_mul(1 << shift).ok_or("more than 16 EiB")?;
            return Ok(Self::Bytes(bytes));
        }
        if shift == 0 {
            return Err(refuse());
        }
        let bytes = decimal(number).ok_or_else(refuse)? * (1u64 << shift) as f64;
        if bytes >= u64::MAX as f64 {
            return Err("more than 16 EiB".into());
        }
        Ok(Self::Bytes(bytes as u64))
    }
}

/// A plain decimal number: no sign, exponent or `inf`, all of which `f64::from_str` accepts.
fn decimal(text: &str) -> Option<f64> {
    let plain = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    plain.then(|| text.parse().ok()).flatten()
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Percent(percent) => write!(f, "{percent}%"),
            Self::Bytes(bytes) => {
                let (unit, shift) = UNITS
                    .iter()
                    .filter(|(_, shift)| bytes != 0 && bytes.is_multiple_of(1 << shift))
                    .max_by_key(|(_, shift)| *shift)
                    .copied()
                    .unwrap_or(("B", 0));
                write!(f, "{}{unit}", bytes >> shift)
            }
        }
    }
}

/// Bytes as the command prints them: two digits after the point, in the unit that leaves one to
/// four before it.
#[derive(Clone, Copy, Debug)]
pub struct BinaryBytes(pub u64);

impl fmt::Display for BinaryBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&binary(self.0 as f64))
    }
}

/// The text of [`BinaryBytes`], also of fractions and falls.
pub fn binary(mut value: f64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut unit = 0;
    // From here on, two digits would make it 1024.00.
    while value.abs() >= 1023.995 && unit + 1 < units.len() {
        (value, unit) = (value / 1024.0, unit + 1);
    }
    if unit == 0 { format!("{value:.0} B") } else { format!("{value:.2} {}", units[unit]) }
}

/// Bytes as torch prints them in its out-of-memory messages: two digits, GiB the largest unit.
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.0 as f64;
        match self.0 {
            0..1024 => write!(f, "{} bytes", self.0),
            1024..1_048_576 => write!(f, "{:.2} KiB", value / 1024.0),
            1_048_576..1_073_741_824 => write!(f, "{:.2} MiB", value / 1_048_576.0),
            _ => write!(f, "{:.2} GiB", value / 1_073_741_824.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(text: &str) -> u64 {
        match text.parse() {
            Ok(Size::Bytes(bytes)) => bytes,
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn sizes_are_read_as_written() {
        assert_eq!(bytes("0"), 0);
        assert_eq!(bytes("1048577"), 1_048_577);
        assert_eq!(bytes("512KiB"), 512 << 10);
        assert_eq!(bytes("2MiB"), 2 << 20);
        assert_eq!(bytes("1.5GiB"), 3 << 29);
        assert_eq!(bytes("2 TiB"), 2 << 40);
        assert_eq!(bytes("17B"), 17);
        assert_eq!(bytes("18446744073709551615"), u64::MAX);
        assert_eq!("90%".parse(), Ok(Size::Percent(90.0)));
        assert_eq!("0.5 %".parse(), Ok(Size::Percent(0.5)));
    }

    #[test]
    fn everything_else_is_refused() {
        for text in [
            "", "-1", "1e9", "inf", "nan", "1.5", "1,5GiB", "GiB", "2MB", "2M", "2mib", "%", "-3%",
            "101%", "1.2.3GiB",
        ] {
            assert!(text.parse::<Size>().is_err(), "{text:?} was accepted");
        }
        for text in ["16777216TiB", "16777216.5TiB", "18446744073709551616"] {
            assert!(text.parse::<Size>().is_err(), "{text:?} overflows");
        }
    }

    #[test]
    fn a_share_is_taken_of_the_device() {
        assert_eq!(Size::Percent(100.0).resolve(85_899_345_921), 85_899_345_921);
        assert_eq!(Size::Percent(50.0).resolve(80 << 30), 40 << 30);
        assert_eq!(Size::Bytes(7).resolve(80 << 30), 7);
    }

    #[test]
    fn bytes_have_two_digits_in_the_fitting_unit() {
        for (bytes, shown) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1500, "1.46 KiB"),
            ((1 << 20) - 1, "1.00 MiB"),
            (3 << 29, "1.50 GiB"),
            (1 << 40, "1.00 TiB"),
            (u64::MAX, "16.00 EiB"),
        ] {
            assert_eq!(BinaryBytes(bytes).to_string(), shown);
        }
        assert_eq!(binary(-1536.0), "-1.50 KiB");
    }

    #[test]
    fn bytes_in_torchs_words_are_gib_at_most() {
        assert_eq!(Bytes(2048 << 30).to_string(), "2048.00 GiB");
        assert_eq!(Bytes(1 << 60).to_string(), "1073741824.00 GiB");
    }

    #[test]
    fn what_is_shown_reads_back_the_same() {
        for size in [
            Size::Bytes(0),
            Size::Bytes(1),
            Size::Bytes(3 << 29),
            Size::Bytes(u64::MAX),
            Size::Percent(12.5),
        ] {
            assert_eq!(size.to_string().parse(), Ok(size));
        }
        assert_eq!(Size::Bytes(512 << 20).to_string(), "512MiB");
    }
}
