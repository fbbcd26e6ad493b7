//! Python pickles, protocol 4, of plain data: dictionaries, lists, tuples, texts, numbers, `None`,
//! `True`, `False`.
//!
//! PyTorch's viewers of memory snapshots read pickles. The maintained crate for pickles
//! (serde-pickle) writes only protocols 2 and 3. The opcodes are those of Python's `pickletools`;
//! framing is optional and omitted. Repeated texts are memoised, as in Python: the keys of a
//! million blocks are written once. So are values of [`Again`].
#![deny(unsafe_code)]

use serde::{Serialize, ser};
use std::collections::HashMap;
use std::fmt;
use std::io::{self, Write};

/// The longest memoised text, and the most texts: their numbers have one byte.
const MEMO_BYTES: usize = 40;
const MEMO_TEXTS: u32 = 256;
/// Items on the reader's stack before they go into their list or dictionary; as in Python.
const BATCH: usize = 1000;

/// Why writing failed or stopped.
#[derive(Debug)]
pub enum Error {
    /// The file could not be written.
    Io(io::Error),
    /// Serialising the value failed.
    Other(String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Io(error) => error.fmt(f),
            Error::Other(reason) => f.write_str(reason),
        }
    }
}

impl std::error::Error for Error {}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        Error::Io(error)
    }
}

impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Io(error) => error,
            Error::Other(reason) => io::Error::other(reason),
        }
    }
}

impl ser::Error for Error {
    fn custom<T: fmt::Display>(reason: T) -> Self {
        Error::Other(reason.to_string())
    }
}

/// Writes `value` as a pickle.
///
/// # Errors
/// The error of `out`, or of serialising `value`.
pub fn write(out: impl Write, value: &(impl Serialize + ?Sized)) -> Result<(), Error> {
    let mut pickler = Pickler { out, memo: HashMap::new(), again: HashMap::new(), memoised: 0 };
    pickler.out.write_all(b"\x80\x04")?;
    value.serialize(&mut pickler)?;
    pickler.out.write_all(b".")?;
    Ok(pickler.out.flush()?)
}

/// A repeated value, written once per number; the reader gets the same object each time.
#[derive(Debug)]
pub struct Again<'a, T>(pub u32, pub &'a T);

/// The name that marks [`Again`] for the serialiser.
const AGAIN: &str = "gruyere-again";

impl<T: Serialize> Serialize for Again<'_, T> {
    fn serialize<S: ser::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_newtype_variant(AGAIN, self.0, "", self.1)
    }
}

struct Pickler<W> {
    out: W,
    /// Places in the reader's memo, for texts and [`Again`]; and how many are taken.
    memo: HashMap<Box<str>, u8>,
    again: HashMap<u32, u32>,
    memoised: u32,
}

impl<W: Write> Pickler<W> {
    fn code(&mut self, code: u8) -> Result<(), Error> {
        Ok(self.out.write_all(&[code])?)
    }

    fn sized(&mut self, short: u8, long: u8, bytes: &[u8]) -> Result<(), Error> {
        match u8::try_from(bytes.len()) {
            Ok(length) => self.out.write_all(&[short, length])?,
            Err(_) => {
                let length = u32::try_from(bytes.len())
                    .map_err(|_| Error::Other("more than 4 GiB".to_owned()))?;
                self.code(long)?;
                self.out.write_all(&length.to_le_bytes())?;
            }
        }
        Ok(self.out.write_all(bytes)?)
    }

    fn text(&mut self, text: &str) -> Result<(), Error> {
        if let Some(&number) = self.memo.get(text) {
            return Ok(self.out.write_all(&[b'h', number])?);
        }
        self.sized(0x8c, b'X', text.as_bytes())?;
        if text.len() <= MEMO_BYTES && self.memoised < MEMO_TEXTS {
            let number = self.memoise()? as u8;
            self.memo.insert(text.into(), number);
        }
        Ok(())
    }

    /// Gives the last written value the next place in the reader's memo.
    fn memoise(&mut self) -> Result<u32, Error> {
        self.code(0x94)?;
        self.memoised += 1;
        Ok(self.memoised - 1)
    }

    fn again<T: Serialize + ?Sized>(&mut self, of: u32, value: &T) -> Result<(), Error> {
        match self.again.get(&of) {
            Some(&number) => {
                self.code(b'j')?;
                Ok(self.out.write_all(&number.to_le_bytes())?)
            }
            None => {
                value.serialize(&mut *self)?;
                let number = self.memoise()?;
                self.again.insert(of, number);
                Ok(())
            }
        }
    }

    fn integer(&mut self, value: i128) -> Result<(), Error> {
        match value {
            0..=0xff => Ok(self.out.write_all(&[b'K', value as u8])?),
            0x100..=0xffff => {
                self.code(b'M')?;
                Ok(self.out.write_all(&(value as u16).to_le_bytes())?)
            }
            -0x8000_0000..=0x7fff_ffff => {
                self.code(b'J')?;
                Ok(self.out.write_all(&(value as i32).to_le_bytes())?)
            }
            // Two's complement, as short as possible.
            _ => {
                let bits = if value < 0 { (!value).leading_zeros() } else { value.leading_zeros() };
                let length = (i128::BITS - bits) as usize / 8 + 1;
                self.out.write_all(&[0x8a, length as u8])?;
                Ok(self.out.write_all(&value.to_le_bytes()[..length])?)
            }
        }
    }

    /// The single dictionary entry of a variant with a value.
    fn variant<T: Serialize + ?Sized>(&mut self, name: &str, value: &T) -> Result<(), Error> {
        self.code(b'}')?;
        self.text(name)?;
        value.serialize(&mut *self)?;
        self.code(b's')
    }

    fn items<'a>(&'a mut self, open: &[u8], close: &'static [u8]) -> Result<Items<'a, W>, Error> {
        self.out.write_all(open)?;
        Ok(Items { pickler: self, count: 0, close, batched: true })
    }

    /// A tuple: its items stay on the reader's stack until it ends.
    fn tuple<'a>(&'a mut self, length: usize) -> Result<Items<'a, W>, Error> {
        let (open, close): (&[u8], &'static [u8]) = match length {
            0 => (b"", b")"),
            1 => (b"", b"\x85"),
            2 => (b"", b"\x86"),
            3 => (b"", b"\x87"),
            _ => (b"(", b"t"),
        };
        let items = self.items(open, close)?;
        Ok(Items { batched: false, ..items })
    }
}

/// A list, tuple or dictionary under write.
struct Items<'a, W> {
    pickler: &'a mut Pickler<W>,
    count: usize,
    close: &'static [u8],
    batched: bool,
}

impl<W: Write> Items<'_, W> {
    fn next(&mut self) -> Result<(), Error> {
        if self.batched && self.count == BATCH {
            self.pickler.out.write_all(self.close)?;
            self.pickler.code(b'(')?;
            self.count = 0;
        }
        self.count += 1;
        Ok(())
    }

    fn item<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Error> {
        self.next()?;
        value.serialize(&mut *self.pickler)
    }

    fn entry<T: Serialize + ?Sized>(&mut self, key: &str, value: &T) -> Result<(), Error> {
        self.next()?;
        self.pickler.text(key)?;
        value.serialize(&mut *self.pickler)
    }

    fn finish(self) -> Result<(), Error> {
        Ok(self.pickler.out.write_all(self.close)?)
    }
}

macro_rules! integers {
    ($($method:ident $kind:ty,)*) => {
        $(fn $method(self, value: $kind) -> Result<(), Error> { self.integer(i128::from(value)) })*
    };
}

impl<'a, W: Write> ser::Serializer for &'a mut Pickler<W> {
    type Ok = ();
    type Error = Error;
    type SerializeSeq = Items<'a, W>;
    type SerializeTuple = Items<'a, W>;
    type SerializeTupleStruct = Items<'a, W>;
    type SerializeTupleVariant = ser::Impossible<(), Error>;
    type SerializeMap = Items<'a, W>;
    type SerializeStruct = Items<'a, W>;
    type SerializeStructVariant = ser::Impossible<(), Error>;

    integers! {
        serialize_i8 i8, serialize_i16 i16, serialize_i32 i32, serialize_i64 i64,
        serialize_u8 u8, serialize_u16 u16, serialize_u32 u32, serialize_u64 u64,
    }

    fn serialize_bool(self, value: bool) -> Result<(), Error> {
        self.code(if value { 0x88 } else { 0x89 })
    }

    fn serialize_f32(self, value: f32) -> Result<(), Error> {
        self.serialize_f64(value.into())
    }

    fn serialize_f64(self, value: f64) -> Result<(), Error> {
        self.code(b'G')?;
        Ok(self.out.write_all(&value.to_be_bytes())?)
    }

    fn serialize_char(self, value: char) -> Result<(), Error> {
        self.text(value.encode_utf8(&mut [0; 4]))
    }

    fn serialize_str(self, value: &str) -> Result<(), Error> {
        self.text(value)
    }

    fn serialize_bytes(self, value: &[u8]) -> Result<(), Error> {
        self.sized(b'C', b'B', value)
    }

    fn serialize_none(self) -> Result<(), Error> {
        self.code(b'N')
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<(), Error> {
        value.serialize(self)
    }

    fn serialize_unit(self) -> Result<(), Error> {
        self.code(b'N')
    }

    fn serialize_unit_struct(self, _name: &'static str) -> Result<(), Error> {
        self.code(b'N')
    }

    fn serialize_unit_variant(
        self,
        _name: &'static str,
        _index: u32,
        variant: &'static str,
    ) -> Result<(), Error> {
        self.text(variant)
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(
        self,
        _name: &'static str,
        value: &T,
    ) -> Result<(), Error> {
        value.serialize(self)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        name: &'static str,
        index: u32,
        variant: &'static str,
        value: &T,
    ) -> Result<(), Error> {
        if name == AGAIN {
            return self.again(index, value);
        }
        self.variant(variant, value)
    }

    fn serialize_seq(self, _length: Option<usize>) -> Result<Items<'a, W>, Error> {
        self.items(b"](", b"e")
    }

    fn serialize_tuple(self, length: usize) -> Result<Items<'a, W>, Error> {
        self.tuple(length)
    }

    fn serialize_tuple_struct(
        self,
        _name: &'static str,
        length: usize,
    ) -> Result<Items<'a, W>, Error> {
        self.tuple(length)
    }

    fn serialize_tuple_variant(
        self,
        name: &'static str,
        _index: u32,
        variant: &'static str,
        _length: usize,
    ) -> Result<Self::SerializeTupleVariant, Error> {
        Err(Error::Other(format!("{name}::{variant} has no form in a pickle")))
    }

    fn serialize_map(self, _length: Option<usize>) -> Result<Items<'a, W>, Error> {
        self.items(b"}(", b"u")
    }

    fn serialize_struct(self, _name: &'static str, _length: usize) -> Result<Items<'a, W>, Error> {
        self.items(b"}(", b"u")
    }

    fn serialize_struct_variant(
        self,
        name: &'static str,
        _index: u32,
        variant: &'static str,
        _length: usize,
    ) -> Result<Self::SerializeStructVariant, Error> {
        Err(Error::Other(format!("{name}::{variant} has no form in a pickle")))
    }
}

impl<W: Write> ser::SerializeSeq for Items<'_, W> {
    type Ok = ();
    type Error = Error;
    fn serialize_element<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Error> {
        self.item(value)
    }
    fn end(self) -> Result<(), Error> {
        self.finish()
    }
}

impl<W: Write> ser::SerializeTuple for Items<'_, W> {
    type Ok = ();
    type Error = Error;
    fn serialize_element<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Error> {
        self.item(value)
    }
    fn end(self) -> Result<(), Error> {
        self.finish()
    }
}

impl<W: Write> ser::SerializeTupleStruct for Items<'_, W> {
    type Ok = ();
    type Error = Error;
    fn serialize_field<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Error> {
        self.item(value)
    }
    fn end(self) -> Result<(), Error> {
        self.finish()
    }
}

impl<W: Write> ser::SerializeMap for Items<'_, W> {
    type Ok = ();
    type Error = Error;
    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), Error> {
        self.item(key)
    }
    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Error> {
        value.serialize(&mut *self.pickler)
    }
    fn end(self) -> Result<(), Error> {
        self.finish()
    }
}

impl<W: Write> ser::SerializeStruct for Items<'_, W> {
    type Ok = ();
    type Error = Error;
    fn serialize_field<T: Serialize + ?Sized>(
        &mut self,
        key: &'static str,
        value: &T,
    ) -> Result<(), Error> {
        self.entry(key, value)
    }
    fn end(self) -> Result<(), Error> {
        self.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Serialize;

    fn pickled(value: &impl Serialize) -> Vec<u8> {
        let mut bytes = Vec::new();
        write(&mut bytes, value).unwrap();
        bytes
    }

    #[test]
    fn numbers_take_the_shortest_form() {
        let body = |value: i64| pickled(&value)[2..].to_vec();
        assert_eq!(body(0), b"K\0.");
        assert_eq!(body(255), b"K\xff.");
        assert_eq!(body(256), b"M\0\x01.");
        assert_eq!(body(65536), b"J\0\0\x01\0.");
        assert_eq!(body(-1), b"J\xff\xff\xff\xff.");
        assert_eq!(body(0x8000_0000), b"\x8a\x05\0\0\0\x80\0.");
        assert_eq!(body(-0x8000_0001), b"\x8a\x05\xff\xff\xff\x7f\xff.");
        assert_eq!(pickled(&u64::MAX)[2..], *b"\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\0.");
    }

    #[test]
    fn a_text_that_comes_again_is_written_once() {
        assert_eq!(pickled(&vec!["ab", "ab", "ab"]), b"\x80\x04](\x8c\x02ab\x94h\0h\0e.");
    }

    /// Also after more texts than have a place, and as the same object in Python.
    #[test]
    fn what_comes_again_is_written_once() {
        let long: Vec<u32> = (0..1000).collect();
        let texts: Vec<String> = (0..300).map(|n| n.to_string()).collect();
        let (a, b) = (Again(7, &long), Again(9, &texts));
        let bytes = pickled(&(&texts, [&a, &a], [&b, &b], &a));
        let once = pickled(&(&texts, &long, &texts)).len();
        assert!(bytes.len() < once + 60, "{} of {once}", bytes.len());
        let script = "import pickle, sys\n\
                      texts, [a, b], [c, d], e = pickle.load(sys.stdin.buffer)\n\
                      assert a == list(range(1000)) and c == texts\n\
                      assert texts == [str(n) for n in range(300)]\n\
                      assert a is b is e and c is d and c is not texts\n";
        read_by_python(script, &bytes);
    }

    fn read_by_python(script: &str, bytes: &[u8]) {
        use std::process::{Command, Stdio};
        let python = Command::new("python3").args(["-c", script]).stdin(Stdio::piped()).spawn();
        let mut python = python.expect("python3, which the tests need");
        io::Write::write_all(python.stdin.as_mut().unwrap(), bytes).unwrap();
        assert!(python.wait().unwrap().success());
    }

    #[test]
    fn what_has_no_form_is_an_error() {
        #[derive(Serialize)]
        enum Odd {
            Pair(u8, u8),
        }
        assert!(write(Vec::new(), &Odd::Pair(1, 2)).unwrap_err().to_string().contains("Odd::Pair"));
    }

    /// Reads the pickles with Python's own reader.
    #[test]
    fn python_reads_what_was_meant() {
        #[derive(Serialize)]
        struct Inner {
            long: String,
            pair: (u64, i64),
            none: Option<u8>,
            five: (u8, u8, u8, u8, u8),
        }
        let inner = |n: u64| Inner {
            long: "é".repeat(200),
            pair: (n << 40, -(n as i64)),
            none: None,
            five: (1, 2, 3, 4, 5),
        };
        let value: Vec<Inner> = (0..2500).map(inner).collect();
        let map: std::collections::BTreeMap<String, f64> =
            (0..2500).map(|n| (n.to_string(), n as f64 / 4.0)).collect();
        let script = "import pickle, sys\n\
                      inner, map, (), flag = pickle.load(sys.stdin.buffer)\n\
                      assert inner == [{'long': 'é' * 200, 'pair': (n << 40, -n), 'none': None, \
                      'five': (1, 2, 3, 4, 5)} for n in range(2500)]\n\
                      assert map == {str(n): n / 4 for n in range(2500)} and flag is True\n";
        #[derive(Serialize)]
        struct Nothing();
        read_by_python(script, &pickled(&(value, map, Nothing(), true)));
    }
}
