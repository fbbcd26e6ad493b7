//! Price files: shipped files are complete with sources, errors are reported, and calls have the
//! file's prices.

use gruyere_phantom::{Config, Costs, GRANULARITY as PAGE, Gpu, Prices};
use serde_json::{Value, json};

fn shipped(name: &str) -> (Prices, Value) {
    let path = format!("{}/prices/{name}.json", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).unwrap();
    (Prices::open(name).unwrap(), serde_json::from_str(&text).unwrap())
}

#[test]
fn each_shipped_figure_has_a_source_and_none_is_left_out() {
    assert_eq!(
        Prices::shipped().collect::<Vec<_>>(),
        ["by-call", "by-mapping", "by-mapping-and-page", "h200"]
    );
    for name in Prices::shipped() {
        let (prices, document) = shipped(name);
        assert_eq!(prices.left_out, [""; 0], "{name}");
        assert_eq!(document["name"], name);
        for (figure, value) in document["costs"].as_object().unwrap() {
            let source = value["source"].as_str().unwrap_or_default();
            assert!(source.len() > 6, "{name}: {figure} has no source");
        }
    }
}

/// The figures from before price files: every earlier measurement depends on them.
#[test]
fn by_call_is_the_default_and_costs_what_it_always_did() {
    let costs = Prices::open("by-call").unwrap().costs;
    assert_eq!(costs, Costs::default());
    assert_eq!(Config::new(1 << 30).costs, costs);
    assert_eq!((costs.create_of(8 << 20), costs.map), (29_000 + 3_000, 2_000));
    assert_eq!(costs.set_access_of(8 << 20, 4, 2), 2 * (38_000 + 1_500));
    assert_eq!(
        (costs.unmap_of(8 << 20, 4), costs.release_of(8 << 20)),
        (34_000 + 1_500, 23_000 + 1_500)
    );
    assert_eq!((costs.alloc_of(4 << 20), costs.free_of(4 << 20)), (70_500, 58_000));
    assert_eq!(
        (costs.query, costs.event, costs.launch, costs.pool_hit),
        (100, 1_000, 8_000, 1_000)
    );
}

/// Host time of one access call and one unmap call over `count` mappings of `bytes`.
fn access_and_unmap(prices: &str, count: u64, bytes: u64) -> (u64, u64) {
    let costs = Prices::open(prices).unwrap().costs;
    let gpu = Gpu::new(Config { costs, ..Config::new(1 << 30) });
    let address = gpu.address_reserve(0, count * bytes, 0).unwrap();
    for index in 0..count {
        let handle = gpu.physical_create(0, bytes).unwrap();
        gpu.map(0, address + index * bytes, bytes, 0, handle).unwrap();
    }
    let now = || gpu.host_time().now;
    let before = now();
    gpu.set_access(0, address, count * bytes, &[0]).unwrap();
    let between = now();
    gpu.unmap(0, address, count * bytes).unwrap();
    (between - before, now() - between)
}

#[test]
fn access_and_unmapping_are_charged_by_the_mappings_that_the_range_holds() {
    for (prices, one, four, wide) in [
        // One mapping of a page, four of a page each, one of four pages.
        ("by-call", (38_000, 34_000), (39_500, 35_500), (39_500, 35_500)),
        ("by-mapping", (38_000, 34_000), (152_000, 136_000), (38_000, 34_000)),
        ("by-mapping-and-page", (35_990, 25_630), (143_960, 102_520), (37_490, 27_130)),
    ] {
        assert_eq!(access_and_unmap(prices, 1, PAGE), one, "{prices}");
        assert_eq!(access_and_unmap(prices, 4, PAGE), four, "{prices}");
        assert_eq!(access_and_unmap(prices, 1, 4 * PAGE), wide, "{prices}");
    }
}

#[test]
fn a_figure_stands_alone_or_with_its_source_and_what_is_left_out_costs_as_by_call() {
    let text = json!({"costs": {"create": 7, "map": {"ns": 8.6, "source": "here"}}}).to_string();
    let prices = Prices::read("mine", &text).unwrap();
    assert_eq!(prices.costs, Costs { create: 7, map: 9, ..Costs::default() });
    assert_eq!(prices.left_out.len(), Costs::NAMES.len() - 2);
    // The probe's output.
    let text = json!({
        "version": 1, "rules": [],
        "prices": {"unit": "ns", "page_bytes": PAGE, "calls": {}, "costs": {"map": 1450}}
    });
    assert_eq!(Prices::read("probe.json", &text.to_string()).unwrap().costs.map, 1450);
}

#[test]
fn what_is_wrong_with_a_price_file_is_said_with_its_remedy() {
    let error = |text: &str| Prices::read("mine.json", text).unwrap_err().to_string();
    for (text, what, remedy) in [
        ("{", "it is no JSON", "crates/phantom/prices/by-call.json is a model"),
        ("{}", "it has no object \"costs\"", "crates/phantom/prices/by-call.json is a model"),
        ("[1]", "it has no object \"costs\"", "is a model"),
        (
            r#"{"costs": {"creat": 1}}"#,
            "\"creat\" is no call's price",
            "there are query, memory_info",
        ),
        (r#"{"costs": {"map": -1}}"#, "\"map\" is -1", "nanoseconds from 0"),
        (r#"{"costs": {"map": 1e300}}"#, "\"map\" is 1e+300", "nanoseconds from 0"),
        (r#"{"costs": {"map": "2 us"}}"#, "\"map\" is \"2 us\"", "\"source\": text"),
        (r#"{"unit": "us", "costs": {}}"#, "\"unit\" is \"us\"", "give them so"),
        (
            r#"{"page_bytes": 4096, "costs": {}}"#,
            "\"page_bytes\" is 4096",
            "pages of 2097152 bytes",
        ),
    ] {
        let said = error(text);
        assert!(said.starts_with("prices mine.json: "), "{said}");
        assert!(said.contains(what) && said.contains(remedy), "{text}: {said}");
    }
    let said = Prices::open("by-cal").unwrap_err().to_string();
    assert!(
        said.contains("by-cal")
            && said.contains("No such file")
            && said.contains("by-mapping-and-page"),
        "{said}"
    );
}
