//! cuDNN's recurrent networks: the place of each weight in their common buffer is exact, a pass is
//! an empty launch, and its reserve and workspace are unknown.

use crate::abi::{Counter, Out};
use crate::cudnn::{BAD_PARAM, EXECUTION_FAILED, NULL_POINTER, done};
use crate::handle::{HandlePtr, launched};
use crate::workspaces;
use std::sync::{Mutex, PoisonError};

/// The used parts of `cudnnRNNMode_t`, `cudnnRNNBiasMode_t` and `cudnnRNNInputMode_t`.
const LSTM: u32 = 2;
const GRU: u32 = 3;
const NO_BIAS: u32 = 0;
const BIAS_OF_INPUT: u32 = 1;
const BIAS_OF_BOTH: u32 = 2;
const BIAS_OF_RECURRENCE: u32 = 3;
const SKIP_INPUT: u32 = 1;

/// A network's shape.
#[derive(Clone, Copy, Debug, Default)]
struct Shape {
    cell: u32,
    bias: u32,
    directions: usize,
    skips_input: bool,
    data: u32,
    input: usize,
    hidden: usize,
    /// Size of the state between steps: the hidden state, or its projection.
    carried: usize,
    layers: usize,
}

/// One weight in the buffer: its first element, and its shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Weight {
    offset: usize,
    rows: usize,
    columns: usize,
}

impl Shape {
    /// Number of gates; each has one matrix for the input and one for the recurrence.
    fn gates(&self) -> usize {
        match self.cell {
            LSTM => 4,
            GRU => 3,
            _ => 1,
        }
    }

    fn projects(&self) -> bool {
        self.carried != self.hidden
    }

    /// Rows and columns of matrix `number` of a layer in one direction; (0, 0): none.
    fn matrix(&self, pseudo_layer: usize, number: usize) -> (usize, usize) {
        let first = pseudo_layer < self.directions;
        match number {
            _ if number < self.gates() => match (first, self.skips_input) {
                (true, true) => (0, 0),
                (true, false) => (self.hidden, self.input),
                (false, _) => (self.hidden, self.carried * self.directions),
            },
            _ if number < 2 * self.gates() => (self.hidden, self.carried),
            _ if number == 2 * self.gates() && self.projects() => (self.carried, self.hidden),
            _ => (0, 0),
        }
    }

    /// The length of vector `number`.
    fn vector(&self, number: usize) -> usize {
        let there = match number / self.gates() {
            0 => matches!(self.bias, BIAS_OF_INPUT | BIAS_OF_BOTH),
            1 => matches!(self.bias, BIAS_OF_RECURRENCE | BIAS_OF_BOTH),
            _ => false,
        };
        if there { self.hidden } else { 0 }
    }

    /// All matrices, then all vectors, each by layer: layer, number, whether it is a matrix, and
    /// its place.
    fn weights(&self) -> impl Iterator<Item = (usize, usize, bool, Weight)> + '_ {
        let mut offset = 0;
        [true, false]
            .into_iter()
            .flat_map(move |is_matrix| {
                (0..self.layers * self.directions).flat_map(move |layer| {
                    (0..=2 * self.gates()).map(move |number| (layer, number, is_matrix))
                })
            })
            .map(move |(layer, number, is_matrix)| {
                let (rows, columns) = match is_matrix {
                    true => self.matrix(layer, number),
                    false => (self.vector(number), 1),
                };
                let weight = Weight { offset, rows, columns };
                offset += rows * columns;
                (layer, number, is_matrix, weight)
            })
    }

    /// The weight, if the network has it.
    fn weight(&self, layer: usize, number: usize, is_matrix: bool) -> Option<Weight> {
        self.weights()
            .find(|&(l, n, m, _)| (l, n, m) == (layer, number, is_matrix))
            .map(|(.., weight)| weight)
            .filter(|weight| weight.rows * weight.columns > 0)
    }

    fn element(&self) -> Result<usize, u32> {
        element(self.data)
    }

    fn bytes(&self) -> Result<usize, u32> {
        let elements: usize = self.weights().map(|(.., weight)| weight.rows * weight.columns).sum();
        Ok(elements * self.element()?)
    }
}

/// Bytes of a `cudnnDataType_t`.
fn element(data: u32) -> Result<usize, u32> {
    match data {
        0 => Ok(4),     // float
        1 => Ok(8),     // double
        2 | 9 => Ok(2), // half, bfloat16
        _ => Err(BAD_PARAM),
    }
}

/// A cuDNN object that remembers the value last set.
pub struct Remembers<T>(Mutex<T>);

/// The C caller's pointer to it.
#[repr(transparent)]
pub struct Held<T>(*const Remembers<T>);

impl<T: Copy + Default> Held<T> {
    fn create(out: Out<Self>) -> u32 {
        done(out.put(Self(Box::into_raw(Box::new(Remembers(Mutex::new(T::default())))))))
    }

    fn destroy(self) -> u32 {
        if !self.0.is_null() {
            // SAFETY: by cuDNN's contract it came from its create function and is destroyed once.
            drop(unsafe { Box::from_raw(self.0.cast_mut()) });
        }
        0
    }

    fn with<U>(&self, then: impl FnOnce(&mut T) -> U) -> Result<U, u32> {
        // SAFETY: by cuDNN's contract a non-null object came from its create function and was not
        // destroyed.
        let object = unsafe { self.0.as_ref() }.ok_or(NULL_POINTER)?;
        Ok(then(&mut object.0.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    fn get(&self) -> Result<T, u32> {
        self.with(|value| *value)
    }
}

/// A tensor descriptor of a weight: data type, rows, columns.
#[derive(Clone, Copy, Debug, Default)]
pub struct Told(u32, i32, i32);

fn code(answer: Result<(), u32>) -> u32 {
    answer.err().unwrap_or(0)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudnnCreateTensorDescriptor(out: Out<Held<Told>>) -> u32 {
    Held::create(out)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudnnDestroyTensorDescriptor(tensor: Held<Told>) -> u32 {
    tensor.destroy()
}

/// Works for the descriptor of a weight; no other is remembered.
#[unsafe(no_mangle)]
pub extern "C" fn cudnnGetTensorNdDescriptor(
    tensor: Held<Told>,
    wanted: i32,
    data: Out<u32>,
    dimensions: Out<i32>,
    sizes: Out<i32>,
    strides: Out<i32>,
) -> u32 {
    code(tensor.get().and_then(|Told(kind, rows, columns)| {
        data.put(kind).and(dimensions.put(3)).map_err(|_| NULL_POINTER)?;
        let (all, steps) = ([1, rows, columns], [rows * columns, columns, 1]);
        for index in 0..wanted.clamp(0, 3) as usize {
            // SAFETY: by cuDNN's contract the arrays have as many elements as the caller wants.
            unsafe {
                sizes.raw().add(index).write(all[index]);
                strides.raw().add(index).write(steps[index]);
            }
        }
        Ok(())
    }))
}

/// `cudnnRNNDescriptor_t`.
type Network = Held<Shape>;

#[unsafe(no_mangle)]
extern "C" fn cudnnCreateRNNDescriptor(out: Out<Network>) -> u32 {
    Held::create(out)
}

#[unsafe(no_mangle)]
extern "C" fn cudnnDestroyRNNDescriptor(network: Network) -> u32 {
    network.destroy()
}

#[unsafe(no_mangle)]
extern "C" fn cudnnSetRNNDescriptor_v8(
    network: Network,
    _algorithm: u32,
    cell: u32,
    bias: u32,
    both_directions: u32,
    input_mode: u32,
    data: u32,
    _precision: u32,
    _math: u32,
    input: i32,
    hidden: i32,
    projection: i32,
    layers: i32,
    _dropout: usize,
    _flags: u32,
) -> u32 {
    if bias > BIAS_OF_RECURRENCE || [input, hidden, projection, layers].iter().any(|&n| n < 0) {
        return BAD_PARAM;
    }
    code(network.with(|shape| {
        *shape = Shape {
            cell,
            bias: if bias == NO_BIAS { NO_BIAS } else { bias },
            directions: if both_directions == 0 { 1 } else { 2 },
            skips_input: input_mode == SKIP_INPUT,
            data,
            input: input as usize,
            hidden: hidden as usize,
            carried: if projection > 0 { projection } else { hidden } as usize,
            layers: layers as usize,
        };
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetRNNWeightSpaceSize(
    _handle: HandlePtr,
    network: Network,
    bytes: Out<usize>,
) -> u32 {
    code(network.get().and_then(|shape| bytes.put(shape.bytes()?).map_err(|_| NULL_POINTER)))
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetRNNWeightParams(
    _handle: HandlePtr,
    network: Network,
    layer: i32,
    _bytes: usize,
    buffer: usize,
    number: i32,
    matrix: Held<Told>,
    matrix_address: Out<usize>,
    vector: Held<Told>,
    vector_address: Out<usize>,
) -> u32 {
    let one = |shape: Shape, is_matrix, told: Held<Told>, address: Out<usize>| {
        let weight = shape.weight(layer as usize, number as usize, is_matrix);
        if let Some(Weight { offset, rows, columns }) = weight {
            // A caller that wants only one of the two passes no descriptor for the other.
            if !told.0.is_null() {
                told.with(|told| *told = Told(shape.data, rows as i32, columns as i32))?;
            }
            address.put_if_wanted(buffer + offset * shape.element()?);
        } else {
            address.put_if_wanted(0);
        }
        Ok(())
    };
    code(network.get().and_then(|shape| {
        one(shape, true, matrix, matrix_address)?;
        one(shape, false, vector, vector_address)
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cudnnGetRNNTempSpaceSizes(
    _handle: HandlePtr,
    _network: Network,
    _mode: u32,
    _input: usize,
    workspace: Out<usize>,
    reserve: Out<usize>,
) -> u32 {
    workspace.put_if_wanted(0);
    reserve.put_if_wanted(0);
    0
}

/// The size of a dropout's random state.
#[unsafe(no_mangle)]
extern "C" fn cudnnDropoutGetStatesSize(_handle: HandlePtr, bytes: Out<usize>) -> u32 {
    workspaces::unknown("cudnnDropoutGetStatesSize");
    done(bytes.put(0))
}

macro_rules! passes {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $name(handle: HandlePtr) -> u32 {
            static CALLS: Counter = Counter::new(stringify!($name));
            workspaces::unknown(stringify!($name));
            launched(&CALLS, handle.stream(), EXECUTION_FAILED)
        }
    )*};
}

passes! { cudnnRNNForward cudnnRNNBackwardData_v8 cudnnRNNBackwardWeights_v8 }

#[cfg(test)]
mod tests {
    use super::*;

    /// Equals torch's count of the parameters of `nn.LSTM(10, 20, 2, bidirectional=True,
    /// proj_size=5)`.
    #[test]
    fn the_weights_of_an_lstm_are_torchs() {
        let shape = Shape {
            cell: LSTM,
            bias: BIAS_OF_BOTH,
            directions: 2,
            skips_input: false,
            data: 0,
            input: 10,
            hidden: 20,
            carried: 5,
            layers: 2,
        };
        let layer = |input: usize| 80 * input + 80 * 5 + 5 * 20 + 2 * 80;
        assert_eq!(shape.bytes(), Ok(4 * 2 * (layer(10) + layer(2 * 5))));
        // Gates lie one behind the other.
        for number in [1, 2, 3, 5, 6, 7] {
            let before = shape.weight(3, number - 1, true).unwrap();
            let this = shape.weight(3, number, true).unwrap();
            assert_eq!(this.offset, before.offset + before.rows * before.columns);
        }
        assert_eq!(shape.weight(0, 8, true).map(|w| (w.rows, w.columns)), Some((5, 20)));
        assert_eq!(shape.weight(0, 8, false), None);
        assert_eq!(shape.weight(0, 9, true), None);
    }
}
