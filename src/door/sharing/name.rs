//! The bytes by which one process names memory to another; torch carries them.
//!
//! ```text
//!   ours    "gruyere" and a version | token of the server, 16 | device, 4
//!                                   | address, bytes, newest: 8 each
//!   torch   [version] 'c'           | CUipcMemHandle, 64              memory of cudaMalloc
//!                                   | CUipcMemHandle, 64              the same, of any version
//!   torch   [version] 'e'           | process and file numbers        expandable segments
//! ```
//!
//! Numbers are little-endian. torch's versions are small numbers, so that a torch without Gruyère
//! takes ours for a later version's, and says so.

use super::server::Token;
use crate::driver::IpcHandle;
use crate::heap::Extent;

/// The last byte is the version.
const MARK: [u8; 8] = *b"gruyere\x01";
/// Bytes of an extent.
pub(super) const EXTENT: usize = size_of::<u32>() + 3 * size_of::<u64>();

/// An extent as bytes.
pub(super) fn extent_to_bytes(extent: Extent) -> [u8; EXTENT] {
    let Extent { device, address, bytes, newest } = extent;
    let mut written = [0; EXTENT];
    let (first, numbers) = written.split_at_mut(size_of::<u32>());
    first.copy_from_slice(&device.to_le_bytes());
    numbers.copy_from_slice([address, bytes, newest].map(u64::to_le_bytes).as_flattened());
    written
}

/// Reads [`extent_to_bytes`].
pub(super) fn extent_of(bytes: &[u8; EXTENT]) -> Option<Extent> {
    let (device, numbers) = bytes.split_first_chunk()?;
    let ([address, bytes, newest], []) = numbers.as_chunks() else { return None };
    let [address, bytes, newest] = [address, bytes, newest].map(|n| u64::from_le_bytes(*n));
    Some(Extent { device: u32::from_le_bytes(*device), address, bytes, newest })
}

/// Chunks of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Name {
    pub(super) server: Token,
    pub(super) extent: Extent,
}

impl Name {
    pub(super) fn to_bytes(self) -> Vec<u8> {
        [&MARK[..], &self.server, &extent_to_bytes(self.extent)].concat()
    }
}

/// What a name stands for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Named {
    Chunks(Name),
    Plain(IpcHandle),
}

impl Named {
    /// Reads a name.
    ///
    /// # Errors
    /// Why this process cannot open it, for the user.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, String> {
        const EXPANDABLE: u8 = b'e';
        const PLAIN: u8 = b'c';
        if let Ok(handle) = bytes.try_into() {
            return Ok(Self::Plain(handle));
        }
        if let Some(rest) = bytes.strip_prefix(&MARK)
            && let Some((&server, extent)) = rest.split_first_chunk()
            && let Some(extent) = extent.try_into().ok().and_then(extent_of)
        {
            return Ok(Self::Chunks(Name { server, extent }));
        }
        if let [_, PLAIN, handle @ ..] = bytes
            && let Ok(handle) = handle.try_into()
        {
            return Ok(Self::Plain(handle));
        }
        Err(match bytes {
            _ if bytes.starts_with(&MARK[..MARK.len() - 1]) => {
                "gruyere: the sender of this CUDA tensor runs another version of Gruyère: install \
                 one version for both"
            }
            [_, EXPANDABLE, ..] => {
                "gruyere: the sender of this CUDA tensor uses torch's expandable segments, which \
                 only torch's own allocator opens: run the sender with Gruyère too, or without \
                 expandable_segments:True"
            }
            _ => "gruyere: the handle of this CUDA tensor is of an unknown kind",
        }
        .to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXTENT: Extent = Extent { device: 5, address: 1 << 40, bytes: 6 << 20, newest: 3 };
    const NAME: Name = Name { server: [7; 16], extent: EXTENT };

    #[test]
    fn a_name_is_read_as_it_was_written() {
        let bytes = NAME.to_bytes();
        assert_eq!(Named::parse(&bytes), Ok(Named::Chunks(NAME)));
        assert!(bytes.len() < 64, "torch takes 64 bytes for a handle of CUDA's own");
    }

    #[test]
    fn the_drivers_handles_are_read_with_and_without_torchs_head() {
        let handle = [9; 64];
        assert_eq!(Named::parse(&handle), Ok(Named::Plain(handle)));
        for version in [1, 2, 3] {
            let torchs = [&[version, b'c'][..], &handle].concat();
            assert_eq!(Named::parse(&torchs), Ok(Named::Plain(handle)), "{version}");
        }
    }

    #[test]
    fn what_cannot_be_opened_is_refused_with_the_reason() {
        let refused = |bytes: &[u8]| Named::parse(bytes).unwrap_err();
        assert!(refused(b"\x02e\0\0\0\0").contains("expandable_segments"));
        let mut later = NAME.to_bytes();
        later[7] = 2;
        assert!(refused(&later).contains("another version of Gruy"));
        let bytes = NAME.to_bytes();
        for cut in [0, 1, 8, 9, bytes.len() - 1] {
            let said = refused(&bytes[..cut]);
            assert!(said.contains("unknown kind") || said.contains("another version"), "{said}");
        }
    }
}
