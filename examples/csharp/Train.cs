// Training in C# with what `pythonop step TARGET --artifacts DIR --portable` writes, on the package Microsoft.ML.OnnxRuntime.
// Main trains the page's spiking network: first `python -m examples.web.build OUT`, then `dotnet run -- OUT`.
using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using System.Text;
using System.Text.Json;
using Microsoft.ML.OnnxRuntime;
using Microsoft.ML.OnnxRuntime.Tensors;

/// <summary>The artifacts of a folder: a step, an evaluation, and the state that goes round. Tensors are named as in manifest.json.</summary>
public sealed class Trainer : IDisposable
{
    readonly InferenceSession training, evaluation;
    readonly RunOptions options = new RunOptions();
    readonly string loss;
    readonly List<KeyValuePair<string, string>> next = new List<KeyValuePair<string, string>>(); // input of a step, output that follows it

    /// <summary>What is learned: parameters, buffers, the optimizer's state, the learning rate; yours to read and to replace.</summary>
    public Dictionary<string, OrtValue> State { get; } = new Dictionary<string, OrtValue>();

    public Trainer(string folder, SessionOptions session = null)
    {
        var manifest = JsonDocument.Parse(File.ReadAllText(Path.Combine(folder, "manifest.json"))).RootElement;
        if (manifest.GetProperty("format").GetInt32() != 1) throw new NotSupportedException($"{folder}: manifest.json is not of format 1");
        var python = string.Join(", ", manifest.GetProperty("python").EnumerateArray());
        if (python != "") throw new NotSupportedException($"{folder} needs Python for {python}: export with --portable");
        InferenceSession Open(string file)
        {
            var name = manifest.GetProperty("files").GetProperty(file).GetString();
            if (name is null or "." or ".." || name.IndexOfAny(new[] { '/', '\\', ':' }) >= 0) // a manifest comes with its files
                throw new InvalidDataException($"{folder}: manifest.json names a file that is not beside it");
            return new InferenceSession(Path.Combine(folder, name), session ?? new SessionOptions());
        }
        training = Open("training");
        evaluation = Open("eval");
        loss = manifest.GetProperty("loss").GetString();
        foreach (var entry in manifest.GetProperty("state").EnumerateArray())
            next.Add(KeyValuePair.Create(entry.GetProperty("name").GetString(), entry.GetProperty("next").GetString()));
        using var initial = Open("initial");
        foreach (var (name, value) in Run(initial, State)) State[name] = value;
    }

    /// <summary>One training step; gives the loss. A batch may also hold a learning_rate for this step.</summary>
    public float Step(IReadOnlyDictionary<string, OrtValue> batch)
    {
        var results = Run(training, batch);
        foreach (var (name, following) in next)
        {
            State[name].Dispose();
            State[name] = results[following];
            results.Remove(following);
        }
        var value = results[loss].GetTensorDataAsSpan<float>()[0];
        foreach (var rest in results.Values) rest.Dispose();
        return value;
    }

    /// <summary>The model's outputs by name, in eval mode and with what was learned so far; they are the caller's to dispose of.</summary>
    public Dictionary<string, OrtValue> Evaluate(IReadOnlyDictionary<string, OrtValue> batch) => Run(evaluation, batch);

    Dictionary<string, OrtValue> Run(InferenceSession session, IReadOnlyDictionary<string, OrtValue> batch)
    {
        foreach (var (name, value) in batch)
        {
            var given = value.GetTensorTypeAndShape().ElementDataType;
            if (session.InputMetadata.TryGetValue(name, out var wanted) && wanted.ElementDataType != given)
                throw new ArgumentException($"{name} has the type {given}, the file takes {wanted.ElementDataType}");
        }
        var inputs = session.InputNames.ToArray();
        var values = inputs.Select(name => batch.TryGetValue(name, out var given) ? given : State[name]).ToArray();
        var outputs = session.OutputNames.ToArray();
        var results = session.Run(options, inputs, values, outputs); // not disposed of: its values live on in the dictionary
        return outputs.Zip(results, KeyValuePair.Create).ToDictionary(pair => pair.Key, pair => pair.Value);
    }

    static readonly Dictionary<string, TensorElementType> Types = new Dictionary<string, TensorElementType>
    {
        ["float32"] = TensorElementType.Float, ["float64"] = TensorElementType.Double,
        ["int64"] = TensorElementType.Int64, ["int32"] = TensorElementType.Int32, ["bool"] = TensorElementType.Bool,
    };

    /// <summary>Writes the whole state as pythonop.mjs does: a line of JSON with names, types and sizes, then the values.</summary>
    public void Save(string path)
    {
        var head = State.Select(entry => new
        {
            name = entry.Key,
            type = Types.First(type => type.Value == entry.Value.GetTensorTypeAndShape().ElementDataType).Key,
            dims = entry.Value.GetTensorTypeAndShape().Shape,
            bytes = entry.Value.GetTensorMutableRawData().Length,
        });
        using (var file = File.Create(path + ".draft")) // killed in the middle, it would leave half a state
        {
            file.Write(Encoding.UTF8.GetBytes(JsonSerializer.Serialize(head) + "\n"));
            foreach (var value in State.Values) file.Write(value.GetTensorMutableRawData());
            file.Flush(true);
        }
        File.Move(path + ".draft", path, true);
    }

    /// <summary>Goes on from what Save, or pythonop.mjs, has written, to the same bits.</summary>
    public void Restore(string path)
    {
        var saved = File.ReadAllBytes(path);
        var at = Array.IndexOf(saved, (byte)'\n') + 1;
        var head = JsonDocument.Parse(saved.AsMemory(0, at)).RootElement.EnumerateArray().ToArray();
        if (!head.Select(entry => entry.GetProperty("name").GetString()).SequenceEqual(State.Keys))
            throw new InvalidDataException($"{path} is the state of another model or optimizer");
        foreach (var entry in head) // before anything is replaced
        {
            var (name, said) = (entry.GetProperty("name").GetString(), entry.GetProperty("type").GetString());
            var sizes = entry.GetProperty("dims").EnumerateArray().Select(size => size.GetInt64()).ToArray();
            var own = State[name].GetTensorTypeAndShape();
            if (!Types.TryGetValue(said, out var known) || known != own.ElementDataType || !sizes.SequenceEqual(own.Shape))
                throw new InvalidDataException(
                    $"{path} is the state of another model or optimizer: {name} is {said} [{string.Join(", ", sizes)}] in it, "
                    + $"and {own.ElementDataType} [{string.Join(", ", own.Shape)}] here");
        }
        if (saved.Length - at != State.Values.Sum(value => (long)value.GetTensorMutableRawData().Length))
            throw new InvalidDataException($"{path} is cut off, or damaged");
        foreach (var entry in head)
        {
            var shape = entry.GetProperty("dims").EnumerateArray().Select(size => size.GetInt64()).ToArray();
            var type = Types[entry.GetProperty("type").GetString()];
            var value = OrtValue.CreateAllocatedTensorValue(OrtAllocator.DefaultInstance, type, shape);
            var bytes = value.GetTensorMutableRawData();
            saved.AsSpan(at, bytes.Length).CopyTo(bytes);
            at += bytes.Length;
            var name = entry.GetProperty("name").GetString();
            State[name].Dispose();
            State[name] = value;
        }
    }

    public void Dispose()
    {
        foreach (var value in State.Values) value.Dispose();
        foreach (var session in new IDisposable[] { training, evaluation, options }) session.Dispose();
    }
}

public static class Program
{
    const int Steps = 200;

    public static void Main(string[] arguments)
    {
        var about = JsonDocument.Parse(File.ReadAllText(Path.Combine(arguments[0], "about.json"))).RootElement;
        int Said(string name) => about.GetProperty(name).GetInt32();
        int batch = Said("batch"), pixels = Said("size") * Said("size"), classes = Said("classes"), training = Said("training"), test = Said("test");
        var data = File.ReadAllBytes(Path.Combine(arguments[0], "digits.bin")); // all labels, then all pixels, a byte each
        Dictionary<string, OrtValue> Images(int first, int count) => new Dictionary<string, OrtValue>
        {
            ["image"] = OrtValue.CreateTensorValueFromMemory(
                data.Skip(training + test + first * pixels).Take(count * pixels).Select(value => value / 255f).ToArray(), new long[] { count, pixels }),
            ["target"] = OrtValue.CreateTensorValueFromMemory(data.Skip(first).Take(count).Select(label => (int)label).ToArray(), new long[] { count }),
        };

        using var model = new Trainer(Path.Combine(arguments[0], "model"));
        for (var step = 0; step < Steps; step++)
        {
            var loss = model.Step(Images(step * batch % training, batch));
            if (step % 20 == 0 || step == Steps - 1) Console.WriteLine($"step {step,3}: loss {loss:R}");
        }
        var logits = model.Evaluate(Images(training, test)).Values.First().GetTensorDataAsSpan<float>().ToArray();
        var right = Enumerable.Range(0, test).Count(image =>
        {
            var row = logits.AsSpan(image * classes, classes).ToArray();
            return Array.IndexOf(row, row.Max()) == data[training + image];
        });
        Console.WriteLine($"right, of {test} unseen digits: {right}");
        if (arguments.Length > 1) model.Save(arguments[1]);
    }
}
