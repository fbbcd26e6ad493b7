//! Sites as JSON, the same in every command.

use gruyere_record::sites::{Frame, SiteId, Sites};
use serde_json::{Value, json};

fn frame(frame: &Frame) -> Value {
    json!({ "file": frame.file, "line": frame.line, "function": frame.function })
}

/// What is known of a site; `null` where nothing is.
pub fn value(sites: &Sites, id: SiteId) -> Value {
    let Some(site) = sites.get(id) else { return Value::Null };
    let known = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    json!({
        "id": id.0,
        "name": sites.place(id).to_string(),
        "module": known(&site.module),
        "phase": site.phase.name(),
        "line": site.line().map(frame),
        "frames": site.frames.iter().map(frame).collect::<Vec<_>>(),
        "forward": sites.get(site.forward).map(|_| site.forward.0),
    })
}
