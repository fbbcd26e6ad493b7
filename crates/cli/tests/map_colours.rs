//! The colours of `gruyere map --html`: everyone can distinguish those of lines and modules.

use std::collections::HashMap;

const STYLE: &str = concat!(
    include_str!("../../../python_loader/gruyere/_page/style.css"),
    include_str!("../src/map/page/page.css")
);
/// The themes, in the order of `light-dark()`.
const THEMES: [&str; 2] = ["light", "dark"];
/// Distance of two lines, in CIE76: two colours of which one is slightly lighter are 10 apart.
const LEAST: f64 = 18.0;
/// Distance of a line and anything else, whose greys and warm colours stand elsewhere in the
/// legend.
const LEAST_TO_OTHERS: f64 = 12.0;

type Vector = [f64; 3];

/// Colours as seen with normal vision, and without red, green or blue cones (Machado, Oliveira and
/// Fernandes, 2009; of linear light).
const EYES: [(&str, [Vector; 3]); 4] = [
    ("everybody", [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]),
    (
        "protanopia",
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ],
    ),
    (
        "deuteranopia",
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ],
    ),
    (
        "tritanopia",
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ],
    ),
];
/// From linear sRGB to XYZ, by its white.
const XYZ: [Vector; 3] = [
    [0.433910, 0.376220, 0.189860],
    [0.212673, 0.715152, 0.072175],
    [0.017756, 0.109470, 0.872774],
];

fn times(matrix: &[Vector; 3], vector: Vector) -> Vector {
    matrix.map(|row| row.iter().zip(vector).map(|(a, b)| a * b).sum())
}

/// CIELAB of a colour as those eyes see it.
fn seen(text: &str, eyes: &[Vector; 3]) -> Vector {
    let part = |at: usize| f64::from(u8::from_str_radix(&text[at..at + 2], 16).unwrap()) / 255.0;
    let linear = |value: f64| match value <= 0.04045 {
        true => value / 12.92,
        false => ((value + 0.055) / 1.055).powf(2.4),
    };
    let light =
        times(eyes, [1, 3, 5].map(|at| linear(part(at)))).map(|value| value.clamp(0.0, 1.0));
    let root = |value: f64| match value > 0.008856 {
        true => value.cbrt(),
        false => 7.787 * value + 16.0 / 116.0,
    };
    let [x, y, z] = times(&XYZ, light).map(root);
    [116.0 * y - 16.0, 500.0 * (x - y), 200.0 * (y - z)]
}

/// The colours of a theme, by name.
fn colours(theme: usize) -> HashMap<&'static str, &'static str> {
    let lines = STYLE.split([';', '{']).filter_map(|line| line.trim().split_once(": light-dark("));
    let both = lines.filter_map(|(name, values)| {
        let values = values.strip_suffix(')')?.split_once(", ")?;
        Some((name.rsplit("--").next()?, [values.0, values.1][theme]))
    });
    both.collect()
}

/// Colours side by side in a legend, against each other and against everything else in it.
fn expect_apart(theme: usize, named: &[String], others: &[&str]) {
    let colours = colours(theme);
    let of = |name: &str| *colours.get(name).unwrap_or_else(|| panic!("{theme} {name}"));
    let named: Vec<&str> = named.iter().map(|name| of(name)).collect();
    let all: Vec<&str> = named.iter().copied().chain(others.iter().copied().map(of)).collect();
    for (eyes, matrix) in &EYES {
        // One in ten thousand is without blue cones.
        let rare = if *eyes == "tritanopia" { 0.6 } else { 1.0 };
        for (n, one) in named.iter().enumerate() {
            for (m, other) in all.iter().enumerate().skip(n + 1) {
                let least = rare * if m < named.len() { LEAST } else { LEAST_TO_OTHERS };
                let (a, b) = (seen(one, matrix), seen(other, matrix));
                let far = a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt();
                let theme = THEMES[theme];
                assert!(far > least, "{theme} {eyes}: {one} and {other} are {far:.1} apart");
            }
        }
    }
}

#[test]
fn lines_are_told_apart_from_each_other_and_from_all_else_also_by_who_is_colour_blind() {
    let lines: Vec<String> = (0..10).map(|n| format!("site-{n}")).collect();
    let others =
        ["pending", "whole", "bound", "gap", "rest", "slots", "paper", "site-10", "site-11"];
    (0..2).for_each(|theme| expect_apart(theme, &lines, &others));
}

#[test]
fn lifetimes_and_phases_are_told_apart_too() {
    let lifetimes = (0..4).map(|n| format!("lifetime-{n}"));
    let named: Vec<String> = lifetimes.chain((1..5).map(|n| format!("phase-{n}"))).collect();
    let others = ["pending", "whole", "bound", "gap", "rest", "slots", "paper"];
    (0..2).for_each(|theme| expect_apart(theme, &named, &others));
}
