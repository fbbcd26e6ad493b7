//! The canaries' result: whether blocks of the library kept their contents.
#![deny(unsafe_code, clippy::unwrap_used)]

use serde::Deserialize;

use super::super::finding::Findings;

/// The canaries' exit code for corruption: a changed word, overlapping blocks, or an access refused
/// by the device.
pub const CORRUPTION: i32 = 3;

/// The canaries' document (tests/gpu/canaries), as far as we read it.
#[derive(Debug, Deserialize)]
pub struct Document {
    wrong: u64,
    overlaps: u64,
    kernels: u8,
    sees_a_fault: u8,
    valid: u8,
    left_bytes: u64,
    blocks: u64,
    refused: u64,
    handed_over: u64,
    streams_destroyed: u64,
    seconds: f64,
    result: i32,
}

const AREA: &str = "stress";

/// Judges the document. `files` is the folder of all the files.
pub fn examine(findings: &mut Findings, document: &Document, files: &str) {
    let Document {
        wrong, overlaps, blocks, refused, handed_over, streams_destroyed, seconds, ..
    } = document;
    let did = format!(
        "{blocks} blocks in {seconds} s, {handed_over} passed between streams, {refused} refused, \
         {streams_destroyed} streams destroyed"
    );
    if document.result == CORRUPTION {
        corruption(
            findings,
            &format!(
                "{wrong} words differed from what was written, {overlaps} blocks overlapped live \
                 ones; {did}"
            ),
            files,
        );
    } else if document.sees_a_fault == 0 {
        findings.problem(
            AREA,
            format!("the stress test missed a planted fault, so it proves nothing; {did}"),
            format!("report it with {files}"),
        );
    } else if document.valid == 0 || document.left_bytes > 0 {
        let books = if document.valid == 0 { "are not sound" } else { "are sound" };
        findings.problem(
            AREA,
            format!(
                "no word was wrong, but the library's books {books}, and {} bytes were left; {did}",
                document.left_bytes
            ),
            format!("report it with {files}"),
        );
    } else if document.result != 0 {
        findings.problem(
            AREA,
            format!("ended with {}; {did}", document.result),
            format!("report it with {files}"),
        );
    } else {
        findings.ok(AREA, format!("every word read back as written: {did}"));
        if document.kernels == 0 {
            findings.note(
                AREA,
                "no kernel runs here: only the beginning of each block was compared, by copies",
            );
        }
    }
}

/// Reports data that was overwritten, or could have been.
pub fn corruption(findings: &mut Findings, what: &str, files: &str) {
    findings.problem(
        AREA,
        format!("CORRUPTION: {what}"),
        format!("do not train with this build on this driver; report it with {files}"),
    );
}

#[cfg(test)]
mod tests {
    use super::super::super::finding::Level;
    use super::*;

    const WELL: &str = r#"{"wrong": 0, "overlaps": 0, "kernels": 1, "sees_a_fault": 1, "valid": 1,
        "left_bytes": 0, "blocks": 2323, "refused": 0, "handed_over": 665, "streams_created": 21,
        "streams_destroyed": 5, "seconds": 20, "seed": 1, "fill": 0.25, "result": 0}"#;

    fn told(changes: &[(&str, &str)]) -> Findings {
        let text = changes.iter().fold(WELL.to_owned(), |text, (from, to)| text.replace(from, to));
        let mut findings = Findings::default();
        examine(&mut findings, &serde_json::from_str(&text).expect("JSON"), "/tmp/x");
        findings
    }

    #[test]
    fn what_is_well_is_ok_and_whatever_else_is_a_problem() {
        let well = told(&[]);
        assert_eq!((well.0.len(), well.count(Level::Ok)), (1, 1), "{}", well.text(None));
        assert_eq!(told(&[("\"kernels\": 1", "\"kernels\": 0")]).count(Level::Note), 1);
        for changes in [
            [("\"wrong\": 0", "\"wrong\": 7"), ("\"result\": 0", "\"result\": 3")],
            [("\"sees_a_fault\": 1", "\"sees_a_fault\": 0"), ("\"result\": 0", "\"result\": 1")],
            [("\"valid\": 1", "\"valid\": 0"), ("\"result\": 0", "\"result\": 1")],
            [("\"left_bytes\": 0", "\"left_bytes\": 512"), ("\"result\": 0", "\"result\": 1")],
        ] {
            let findings = told(&changes);
            assert_eq!(findings.count(Level::Problem), 1, "{changes:?}");
            assert!(findings.text(None).contains("/tmp/x"), "{changes:?}");
        }
    }
}
