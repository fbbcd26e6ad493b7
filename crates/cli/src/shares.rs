//! Fragmentation, idle, unused and the peak ratio, as in every command's `--json`.

use gruyere_record::held::Shares;
use gruyere_record::reader::DeviceSnapshot;
use serde_json::Value;

/// `value` with the shares of a device.
pub fn told(value: Value, device: &DeviceSnapshot) -> Value {
    with(value, &device.held().shares(device.peak_ratio()))
}

/// `value` with the members of `shares`.
pub fn with(mut value: Value, shares: &Shares) -> Value {
    if let (Some(members), Ok(Value::Object(more))) =
        (value.as_object_mut(), serde_json::to_value(shares))
    {
        members.extend(more);
    }
    value
}
