//! How an ELF file is loaded.
#![deny(unsafe_code)]

use std::fs::File;
use std::path::Path;

use object::elf::{EM_AARCH64, EM_X86_64, FileHeader64, Machine};
use object::read::elf::{FileHeader as _, ProgramHeader as _};
use object::{Endianness, ReadCache};

/// The machine of this command's build.
const MACHINE: Machine = if cfg!(target_arch = "aarch64") { EM_AARCH64 } else { EM_X86_64 };

/// A file, as the kernel and the dynamic loader see it.
#[derive(Debug, PartialEq, Eq)]
pub enum Kind {
    /// Not ELF: a script, or not executable at all.
    NotElf,
    /// For another machine, or 32 bits wide.
    Foreign,
    /// Without a loader: a statically linked program, or a library.
    NoLoader,
    /// Loaded by this loader.
    Loaded(String),
}

/// Whether the library exports a symbol.
pub fn defines(path: &Path, symbol: &str) -> bool {
    use object::{Object as _, ObjectSymbol as _};
    let Ok(file) = File::open(path) else { return false };
    let data = ReadCache::new(file);
    object::File::parse(&data).is_ok_and(|object| {
        object.dynamic_symbols().any(|known| known.is_definition() && known.name() == Ok(symbol))
    })
}

/// Kind of the file. An unreadable file is [`Kind::NotElf`]: its execution reports the error.
pub fn kind(path: &Path) -> Kind {
    let Ok(file) = File::open(path) else { return Kind::NotElf };
    let data = ReadCache::new(file);
    let mut magic = [0; 5];
    match object::ReadRef::read_bytes_at(&data, 0, 5) {
        Ok(bytes) => magic.copy_from_slice(bytes),
        Err(()) => return Kind::NotElf,
    }
    if magic[..4] != *b"\x7fELF" {
        return Kind::NotElf;
    }
    let Ok(header) = FileHeader64::<Endianness>::parse(&data) else { return Kind::Foreign };
    let Ok(endian) = header.endian() else { return Kind::Foreign };
    if header.e_machine(endian) != MACHINE || !header.is_little_endian() {
        return Kind::Foreign;
    }
    let Ok(segments) = header.program_headers(endian, &data) else { return Kind::Foreign };
    for segment in segments {
        if let Ok(Some(loader)) = segment.interpreter(endian, &data) {
            return Kind::Loaded(String::from_utf8_lossy(loader).into_owned());
        }
    }
    Kind::NoLoader
}
