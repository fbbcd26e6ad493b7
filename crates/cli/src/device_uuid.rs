//! A device's UUID in the format of NVML, nvidia-smi and DCGM.
#![deny(unsafe_code, clippy::unwrap_used)]

/// `GPU-` and the bytes in five groups.
pub fn uuid_text(uuid: &[u8; 16]) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

#[cfg(test)]
mod tests {
    use super::uuid_text;

    #[test]
    fn a_uuid_is_written_as_nvml_does() {
        let uuid: [u8; 16] = std::array::from_fn(|byte| byte as u8 * 17);
        assert_eq!(uuid_text(&uuid), "GPU-00112233-4455-6677-8899-aabbccddeeff");
    }
}
